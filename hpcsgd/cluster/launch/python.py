"""Which Python ranks on other nodes are started by."""

from __future__ import annotations

import sys
from pathlib import Path

ORIGIN = "hpcsgd-pack"
"""A file of an unpacked environment, which names the pack that it came from."""


def of_ranks(prefix: Path = Path(sys.prefix)) -> str:
    """This one, or the pack that it was unpacked from: other nodes may have to do that first."""
    origin = prefix / ORIGIN
    return origin.read_text(encoding="utf-8").strip() if origin.exists() else sys.executable
