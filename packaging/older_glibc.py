"""Link against an older glibc than this machine's: `python older_glibc.py FOLDER 2.28`, and `-LFOLDER`.

A linker takes the newest version of each symbol that its C library has, and older systems then refuse the
result. glibc keeps the older versions for the programs of old, so FOLDER gets stand-ins for its libraries
that have, of each function that got a version after the one asked for, only the newest before; linkers that
are told of FOLDER look there first. What has no older version stays as it is, and `auditwheel repair --plat`
refuses it.
"""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from elftools.elf.elffile import ELFFile  # pyright: ignore[reportMissingImports]

FUNCTIONS = {"STT_FUNC", "STT_LOOS"}  # the latter choose among implementations as they are loaded
# Until glibc 2.34 these were libraries of their own, and stubs of them are still there.
MOVED = {
    "libpthread.so.0": ("pthread_", "__pthread_", "sem_"),
    "libdl.so.2": ("dl",),
    "librt.so.1": ("shm_", "timer_", "mq_", "aio_"),
}


def functions(library: Path) -> Iterator[tuple[str, str]]:
    """Functions that a library exports, each with a version: a name may come several times."""
    with library.open("rb") as file:
        elf = ELFFile(file)
        names = {
            version["vd_ndx"]: next(iter(auxiliary)).name
            for version, auxiliary in elf.get_section_by_name(".gnu.version_d").iter_versions()
        }
        numbers = elf.get_section_by_name(".gnu.version")
        for i, symbol in enumerate(elf.get_section_by_name(".dynsym").iter_symbols()):
            number = numbers.get_symbol(i)["ndx"]
            imported = symbol["st_shndx"] == "SHN_UNDEF"
            if symbol["st_info"]["type"] in FUNCTIONS and not imported and isinstance(number, int):
                yield symbol.name, names[number & 0x7FFF]


def order(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.removeprefix("GLIBC_").split(".")))


def older(library: Path, newest: tuple[int, ...]) -> dict[str, str]:
    """The version to link against of each function that has both a later one and this."""
    versions = defaultdict(list)
    for name, version in functions(library):
        if version != "GLIBC_PRIVATE":
            versions[name].append(version)
    chosen = {}
    for name, known in versions.items():
        allowed = [version for version in known if order(version) <= newest]
        if allowed and len(allowed) < len(known):
            chosen[name] = max(allowed, key=order)
    return chosen


def home(name: str, library: str) -> str:
    """The library that had this function before."""
    was = [old for old, beginnings in MOVED.items() if name.startswith(beginnings)]
    return was[0] if was and library == "libc.so.6" else library


def stand_in(folder: Path, soname: str, versions: dict[str, str]) -> Path:
    """A shared object of that name with these functions, which do nothing."""
    source, script, out = (folder / f"{soname}{end}" for end in (".s", ".map", ""))
    lines = [
        f".globl f{i}\n.type f{i}, %function\nf{i}:\n.symver f{i}, {name}@@{version}\n"
        for i, (name, version) in enumerate(versions.items())
    ]
    source.write_text(".text\n" + "".join(lines))
    script.write_text("".join(f"{version} {{ }};\n" for version in sorted(set(versions.values()))))
    command = ["-shared", "-nostdlib", f"-Wl,-soname={soname}", f"-Wl,--version-script={script}"]
    subprocess.run(["g++", *command, str(source), "-o", str(out)], stdin=subprocess.DEVNULL, check=True)
    return out


def found(library: str) -> Path:
    """Where the compiler finds it."""
    command = ["g++", f"-print-file-name={library}"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    return Path(done.stdout.strip()).resolve()


def main(folder: Path, newest: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for linked, soname in (("libc.so", "libc.so.6"), ("libm.so", "libm.so.6")):
        homes = defaultdict(dict)
        for name, version in older(found(soname), tuple(map(int, newest.split(".")))).items():
            homes[home(name, soname)][name] = version
        first = " ".join(str(stand_in(folder, each, homes[each])) for each in sorted(homes))
        (folder / linked).write_text(f"INPUT ( AS_NEEDED ( {first} ) {found(linked)} )\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), sys.argv[2])
