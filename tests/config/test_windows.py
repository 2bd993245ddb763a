from __future__ import annotations

from itertools import islice

import pytest

from hpcsgd.config.windows import windows
from hpcsgd.errors import UserError


def test_those_that_are_given() -> None:
    assert list(windows("10-17, 500")) == [range(10, 18), range(500, 501)]
    assert list(windows(" 3 - 4,6", done=4)) == [range(6, 7)]


def test_soon_after_the_start_and_then_rarely() -> None:
    assert list(islice(windows("auto"), 3)) == [range(3, 11), range(100, 108), range(1000, 1008)]
    assert list(islice(windows("auto", done=95), 2)) == [range(98, 106), range(1000, 1008)]
    assert list(islice(windows("auto", done=100), 2)) == [range(103, 111), range(1000, 1008)]


@pytest.mark.parametrize("text", ["", "often", "0", "5-3", "5-9, 9-12", "7, 3", "3--4", "1.5", "9" * 5000])
def test_what_is_neither_is_refused(text: str) -> None:
    with pytest.raises(
        UserError, match=r'trace_steps = .*: expected steps from 1 on, in order, as "10-17, 500"'
    ):
        windows(text)
