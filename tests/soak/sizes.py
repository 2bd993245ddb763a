"""The number of cases of each test: some in `make test-all`, all in `make soak`."""

from __future__ import annotations

import pytest

ENOUGH = 3600
"""Seconds that all cases of one test may take on a busy machine."""


def cases(some: int, every: int) -> pytest.MarkDecorator:
    """Return the mark that sets the parameter `cases` to the number of cases."""
    marks = [pytest.mark.soak, pytest.mark.timeout(ENOUGH)]
    return pytest.mark.parametrize(
        "cases", [pytest.param(some, id="some"), pytest.param(every, marks=marks, id="all")]
    )
