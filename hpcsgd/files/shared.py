"""Reading of files that another node has just written in a shared folder.

NFS remembers for up to a minute which names did not exist, but asks the server when a folder is opened. So
code that waits for a name must open the folder, rather than ask for the name.
"""

from __future__ import annotations

import os
from pathlib import Path

from hpcsgd.errors import UserError


def names_in(folder: Path) -> list[str]:
    """Return the names in the folder now; none if there is no folder."""
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def text_of(path: Path) -> str | None:
    """Return the text of a file, or None if it does not exist. Raises `UserError` if it cannot be read."""
    if path.name not in names_in(path.parent):
        return None
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
