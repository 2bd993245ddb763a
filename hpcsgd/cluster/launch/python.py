"""Find the Python that starts ranks, possibly on other nodes."""

from __future__ import annotations

import sys
from pathlib import Path

ORIGIN = "hpcsgd-pack"
"""A file in an environment that a node has unpacked. It contains the path of the file that was unpacked."""


def of_ranks(prefix: Path = Path(sys.prefix)) -> str:
    """Return the path of a Python that starts ranks on every node: usually the Python that runs now.

    `hpcsgd job pack` writes a Python environment into one file, which can be executed in place of Python, and
    which each node unpacks on its own disk. If the environment `prefix` was unpacked from such a file, the
    result is the path of this file, because other nodes may not have unpacked it yet.
    """
    origin = prefix / ORIGIN
    return origin.read_text(encoding="utf-8").strip() if origin.exists() else sys.executable
