"""Find the Python that starts ranks, possibly on other nodes."""

from __future__ import annotations

import sys
from pathlib import Path

ORIGIN = "hpcsgd-pack"
"""A file in an unpacked environment, with the path of the packed file."""


def of_ranks(prefix: Path = Path(sys.prefix)) -> str:
    """Return this Python's path. If it was unpacked, return the packed file, which runs on every node."""
    origin = prefix / ORIGIN
    return origin.read_text(encoding="utf-8").strip() if origin.exists() else sys.executable
