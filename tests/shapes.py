"""Test parameters for shapes: `make test-all` runs some of them, and `make test-long` all."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def some(shapes: Iterable[tuple[int, int]], often: Container[tuple[int, int]]) -> list[Any]:
    """Return `shapes` as test parameters P and K. Those that are not in `often` have the mark `long`."""
    return [pytest.param(*shape, marks=[] if shape in often else [pytest.mark.long]) for shape in shapes]
