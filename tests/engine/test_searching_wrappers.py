"""Several threads search for torch's wrappers at once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from hpcsgd.engine import around_model


@pytest.fixture
def threads_change_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("threads_change_often")
def test_searches_do_not_disturb_each_other() -> None:
    """Each search finds the objects that refer to these classes, also those that Python makes for others."""
    with ThreadPoolExecutor(4) as pool:
        searches = [pool.submit(around_model._around, set()) for _ in range(1000)]
    assert [search.result() for search in searches] == [None] * 1000
