"""What one node reads of what another has just written, in a folder that both see.

NFS remembers for up to a minute which names were not there, but asks the server when a folder is opened. So
whoever waits for a name opens its folder, and does not ask for the name alone.
"""

from __future__ import annotations

import os
from pathlib import Path

from hpcsgd.errors import UserError


def names_in(folder: Path) -> list[str]:
    """As they are now; none where there is no folder."""
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def text_of(path: Path) -> str | None:
    """None where there is no such file. Raises `UserError` where it cannot be read."""
    if path.name not in names_in(path.parent):
        return None
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
