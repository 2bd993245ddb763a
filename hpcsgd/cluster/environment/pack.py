"""Write an environment into one file: the script ``unpacking.sh``, and the archive that it unpacks."""

from __future__ import annotations

import hashlib
import io
import os
import re
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcsgd.cluster.environment.contents import Environment, Member
from hpcsgd.cluster.launch.python import ORIGIN
from hpcsgd.errors import UserError
from hpcsgd.files.atomic import replacing

SCRIPT = Path(__file__).with_name("unpacking.sh")
HEADER = 8192
"""Bytes that the script occupies before the archive; the script skips them as one block of dd."""
UNQUOTABLE = re.compile(r"[\"`\\\n]|\$\(")


@dataclass(frozen=True)
class Packed:
    """A packed environment that has been written."""

    file: Path
    name: str
    """The name of the folder into which nodes unpack the file. Other contents have another name."""
    files: int
    bytes: int


def pack(environment: Environment, file: Path, local: str) -> Packed:
    """Write `environment` to `file`, which nodes unpack in the folder `local`.

    `local` may contain variables, which the shell of each node expands.
    """
    if UNQUOTABLE.search(local) or not local:
        raise UserError(f'local = "{local}": expected a folder, in which $NAME is a variable of the node')
    members = list(environment.members())
    name = fingerprint(members)
    header = _header(environment, name, local)
    with replacing(file) as part:
        with part.open("wb") as out:
            out.write(header)
            with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT, dereference=True) as tar:
                for member in members:
                    _add(tar, member)
        part.chmod(0o755)
    return Packed(file, name, len(members), file.stat().st_size)


def fingerprint(members: Sequence[Member]) -> str:
    """Return a hash of the names, sizes, modification times and permissions of `members`."""
    digest = hashlib.sha256()
    for member in members:
        reported: tuple[object, ...] = (member.link,)
        if member.link is None:
            status = member.source.stat()
            reported = (status.st_mode, status.st_size, status.st_mtime_ns)
        digest.update(repr((member.name, *reported)).encode())
    return digest.hexdigest()[:16]


def changed_since(environment: Environment, file: Path) -> bool:
    """Return True if the environment has changed since it was packed in `file`.

    Installed and removed packages count as changes, and so do edited sources that are installed in place.
    """
    packed = file.stat().st_mtime
    edited = (path for source in environment.sources for path in [source, *source.rglob("*.py")])
    return any(path.stat().st_mtime > packed for path in [*environment.sites, *edited])


def _add(tar: tarfile.TarFile, member: Member) -> None:
    if member.link is not None:
        info = tarfile.TarInfo(member.name)
        info.type, info.linkname = tarfile.SYMTYPE, member.link
        tar.addfile(info)
        return
    info = tar.gettarinfo(member.source, member.name)
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    if member.content is not None:
        info.size = len(member.content)
        tar.addfile(info, io.BytesIO(member.content))
        return
    with member.source.open("rb") as source:
        tar.addfile(info, source)


def _header(environment: Environment, name: str, local: str) -> bytes:
    text = SCRIPT.read_text(encoding="utf-8")
    values = {
        "LOCAL": local,
        "NAME": name,
        "HEADER": str(HEADER),
        "SYSTEM": "true" if environment.of_base else "false",
        "VERSION": environment.version,
        "ORIGIN": ORIGIN,
        "LIBRARIES": _libraries(environment),
    }
    for key, value in values.items():
        text = text.replace(f"@{key}@", value)
    header = text.encode()
    assert len(header) <= HEADER
    return header.ljust(HEADER, b"\n")


def _libraries(environment: Environment) -> str:
    """Return a shell line that makes an unpacked interpreter load its own libraries, or a comment."""
    if not environment.shared:
        return "# (the interpreter finds its libraries)"
    folders = {os.path.relpath(path.parent, environment.base) for path in environment.libraries()}
    if not folders:
        return "# (the interpreter's libraries are the system's)"
    words = ":".join(f"$there/base/{folder}" for folder in sorted(folders))
    return f'export LD_LIBRARY_PATH="{words}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"'
