"""Shapes of which `make test-all` has some, and `make test-long` all."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def some(shapes: Iterable[tuple[int, int]], often: Container[tuple[int, int]]) -> list[Any]:
    """As parameters P and K."""
    return [pytest.param(*shape, marks=[] if shape in often else [pytest.mark.long]) for shape in shapes]
