"""Link against an older glibc than this machine's: `python older_glibc.py FOLDER 2.28`, and `-LFOLDER`.

A linker uses the newest version of each symbol in its C library, and older systems then refuse the result.
glibc still has the older versions, for old programs. So this program writes stand-ins for glibc's libraries
into FOLDER. If a function has a version newer than the requested glibc, the stand-in has only the newest one
that is allowed. With `-LFOLDER`, the linker looks there first. Functions without an older version stay as
they are, and `auditwheel repair --plat` refuses them.
"""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from elftools.elf.elffile import ELFFile  # pyright: ignore[reportMissingImports]

FUNCTIONS = {"STT_FUNC", "STT_LOOS"}  # a function of type STT_LOOS chooses its code when loaded
# Until glibc 2.34 these were separate libraries, and stubs of them still exist.
MOVED = {
    "libpthread.so.0": ("pthread_", "__pthread_", "sem_"),
    "libdl.so.2": ("dl",),
    "librt.so.1": ("shm_", "timer_", "mq_", "aio_"),
}


def functions(library: Path) -> Iterator[tuple[str, str]]:
    """Yield the functions that a library exports, with their versions. A name may occur several times."""
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
    """Return the version to link against, for each function that also has a version above `newest`."""
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
    """Return the library that had this function before glibc 2.34."""
    was = [old for old, beginnings in MOVED.items() if name.startswith(beginnings)]
    return was[0] if was and library == "libc.so.6" else library


def stand_in(folder: Path, soname: str, versions: dict[str, str]) -> Path:
    """Make a shared object of the name `soname` with these functions, which do nothing; return its path."""
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
    """Return the path at which the compiler finds a library."""
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
