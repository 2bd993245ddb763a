"""How many cases: some in `make test-all`, all in `make soak`."""

from __future__ import annotations

import pytest

ENOUGH = 3600
"""Seconds, for all cases of one test on a busy machine."""


def cases(some: int, every: int) -> pytest.MarkDecorator:
    """As parameter `cases`."""
    marks = [pytest.mark.soak, pytest.mark.timeout(ENOUGH)]
    return pytest.mark.parametrize(
        "cases", [pytest.param(some, id="some"), pytest.param(every, marks=marks, id="all")]
    )
