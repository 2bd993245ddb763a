"""Which Python starts ranks on other nodes."""

from __future__ import annotations

import sys
from pathlib import Path

ORIGIN = "hpcsgd-pack"
"""A file of an unpacked environment, with the path of the pack that it came from."""


def of_ranks(prefix: Path = Path(sys.prefix)) -> str:
    """Return this Python, or the pack that it came from, which other nodes may have to unpack."""
    origin = prefix / ORIGIN
    return origin.read_text(encoding="utf-8").strip() if origin.exists() else sys.executable
