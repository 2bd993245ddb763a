"""The contents of a packed environment, and their paths in the archive.

    bin lib …   the virtual environment, unchanged except that scripts use the Python next to them
    base/       the environment's interpreter and standard library, often from a shared file system, too

Packages that are installed in place (``pip install -e``) are packed where a normal installation puts them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcsgd.errors import UserError

QUESTION = Path(__file__).with_name("question.py")
WITHOUT = {"test", "tests", "idlelib", "turtledemo", "ensurepip", "site-packages", "dist-packages"}
"""Folders of the standard library that are not packed with it.

Packages of the base installation are packed separately, if the environment uses them.
"""
INTERPRETERS = re.compile(r"python[\d.]*|[aA]ctivate.*|pyvenv\.cfg")
"""Files that are not copied. The archive has new ones, or unpacking writes them."""
ADDED_FILES = b"""#!/bin/sh
'''exec' "$(dirname -- "$(realpath -- "$0")")/python" "$0" "$@"
' '''
"""
"""The first lines of scripts, valid for the shell and Python; they start the Python next to them."""
SYSTEM = Path("/usr")
"""The folder whose libraries need not be packed, because each node has them itself."""


@dataclass(frozen=True)
class Member:
    """A file of the archive: a copy of `source`, a file with the given `content`, or a symbolic link."""

    name: str
    source: Path
    content: bytes | None = None
    link: str | None = None


@dataclass(frozen=True)
class Environment:
    """A Python environment, as its interpreter describes it by ``question.py``."""

    prefix: Path
    base: Path
    executable: Path
    version: str
    standard: list[Path]
    """Folders of the standard library."""
    shared: bool
    """True if the interpreter is in a shared library, which is found by its absolute path."""
    sites: list[Path]
    """Folders in which packages are installed."""
    path: list[Path]
    """The interpreter's `sys.path`."""
    editable: list[dict[str, Any]]
    """Descriptions of packages that are installed in place: `name`, `sources` and `leads`."""

    @property
    def sources(self) -> list[Path]:
        """The sources of packages that are installed in place."""
        return [Path(source) for each in self.editable for source in each["sources"]]

    @property
    def of_base(self) -> list[Path]:
        """Folders of packages of the base installation that the environment uses, too."""
        return [
            path
            for path in self.path
            if path.is_relative_to(self.base) and path.name.endswith("-packages") and path not in self.sites
        ]

    @property
    def left(self) -> list[Path]:
        """Folders on the interpreter's path that are not packed, and are read from where they are."""
        typed = [Path(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        packed = {self.prefix, self.base}
        beside = {source.parent for source in self.sources} - set(typed)
        return [p for p in self.path if p not in beside and not any(p.is_relative_to(x) for x in packed)]

    def members(self) -> Iterator[Member]:
        """Yield all files of the archive. The last one, bin/python, shows that unpacking is complete."""
        leads = {Path(lead) for each in self.editable for lead in each["leads"]}
        for member in below(self.prefix, ""):
            if member.source in leads or INTERPRETERS.fullmatch(member.name.removeprefix("bin/")):
                continue
            yield self._beside(member) if member.name.startswith("bin/") else member
        site = self.sites[0].relative_to(self.prefix)
        for source in self.sources:
            name = str(site / source.name)
            yield from below(source, name) if source.is_dir() else [Member(name, source)]
        for folder in self.standard:
            for member in below(folder, self._in_base(folder), WITHOUT):
                if not member.name.endswith(".a"):
                    yield member
        for folder in self.of_base:
            yield from below(folder, self._in_base(folder))
        for library in self.libraries():
            yield Member(self._in_base(library), library)
        yield Member(f"base/bin/{self.executable.name}", self.executable)
        for name in (f"python{self.version.rpartition('.')[0]}", "python3"):
            yield Member(f"bin/{name}", self.prefix, link="python")
        yield Member("bin/python", self.prefix, link=f"../base/bin/{self.executable.name}")

    def libraries(self) -> list[Path]:
        """Return the shared libraries that the interpreter loads from the base installation."""
        if self.base == SYSTEM:
            return []
        users = [self.executable, *(x for folder in self.standard for x in folder.glob("lib-dynload/*.so"))]
        done = subprocess.run(
            ["ldd", *users], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        found = {Path(path) for path in re.findall(r"=> (/\S+)", done.stdout)}
        return sorted(path for path in found if path.is_relative_to(self.base))

    def _in_base(self, path: Path) -> str:
        return str("base" / path.relative_to(self.base))

    def _beside(self, member: Member) -> Member:
        """Return `member`, but a script of this environment with a first line for the Python next to it."""
        if member.link is not None:
            return member
        with member.source.open("rb") as file:
            if file.read(2) != b"#!":
                return member
            text = b"#!" + file.read()
        python = re.escape(bytes(self.prefix / "bin" / "python"))
        named = rb"#!%b[\d.]*\n|#!/bin/sh\n'''exec' \"?%b[^\n]*\n' '''\n" % (python, python)
        found = re.match(named, text)
        return (
            member if found is None else Member(member.name, member.source, ADDED_FILES + text[found.end() :])
        )


def below(folder: Path, name: str, without: Set[str] = frozenset()) -> Iterator[Member]:
    """Yield the files in `folder`, which is called `name` in the archive.

    Relative links inside the folder stay links.
    """
    yield from _below(folder, name, folder.resolve(), without)


def _below(folder: Path, name: str, root: Path, without: Set[str]) -> Iterator[Member]:
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        path, inside = Path(entry.path), f"{name}/{entry.name}".removeprefix("/")
        if entry.name in without:
            continue
        target = os.readlink(path) if entry.is_symlink() else None
        if target is not None and not os.path.isabs(target) and path.resolve().is_relative_to(root):
            yield Member(inside, path, link=target)
        elif entry.is_dir():
            yield from _below(path, inside, root, frozenset())
        elif entry.is_file():
            yield Member(inside, path)


def ask(folder: Path) -> Environment:
    """Return the environment in `folder`. Raises `UserError` if it cannot be packed."""
    python = folder.absolute() / "bin" / "python"
    if (folder / "conda-meta").is_dir():
        raise UserError(f"{folder}: an environment of conda, which conda-pack packs")
    if not (folder / "pyvenv.cfg").exists() or not python.exists():
        raise UserError(f"{folder}: not a virtual environment, as python -m venv makes them")
    done = subprocess.run(
        [python, "-P", QUESTION], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise UserError(f"{python}: does not run: {done.stderr.strip().rpartition(chr(10))[2]}")
    answer = json.loads(done.stdout)
    one: dict[str, Any] = {name: Path(answer[name]) for name in ("prefix", "base", "executable")}
    many: dict[str, Any] = {
        name: [Path(path) for path in answer[name]] for name in ("standard", "sites", "path")
    }
    found = Environment(**{**answer, **one, **many})
    if unknown := [each["name"] for each in found.editable if not each["sources"]]:
        raise UserError(
            f"{folder}: {', '.join(unknown)}: installed in place (pip install -e), and does not tell its "
            "packages: install without -e"
        )
    return found
