"""Reading of whole files, of a user or a run, that may be missing or damaged, or may be no regular files."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from hpcsgd.errors import UserError

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def read_text(path: Path) -> str:
    """Return the text of a file, without the byte order mark of Windows editors.

    Raises `UserError` if it cannot be read, is no regular file or not UTF-8.
    """
    try:
        require_regular(path)
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from error


def read_json(path: Path) -> Any:
    """Return the content of a JSON file. Raises `UserError` if it cannot be read, or is not JSON."""
    text = read_text(path)
    try:
        return parsed(text)
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}") from error


def parsed(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises `ValueError` if it is not JSON, or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("too many lists or tables inside each other") from None


def require_regular(path: Path) -> None:
    """Raise `UserError` unless `path` is a regular file, and `OSError` if nothing is there.

    Reading a pipe could wait forever.
    """
    kind = stat.S_IFMT(path.stat().st_mode)
    if kind != stat.S_IFREG:
        raise UserError(f"{path}: {_KINDS.get(kind, 'something else')}, and not a file")
