"""One thread that suppresses warnings does not restore those of another; messages contain correct counts."""

from __future__ import annotations

import threading
import warnings

import pytest

from hpcsgd.errors import count_text, without_warnings


def test_two_threads_do_not_bring_back_each_others_warnings():
    """The second thread asks while the first one suppresses warnings, and continues after the first one."""
    inside, warned = threading.Event(), []
    before = list(warnings.filters)

    def second() -> None:
        with without_warnings():
            first.join(10)
            try:
                warnings.warn("from the second", stacklevel=1)
            except UserWarning as shown:
                warned.append(shown)

    def begin() -> None:
        with without_warnings():
            inside.set()
            other.start()
            other.join(0.1)  # without the lock the second thread would be inside, too

    other = threading.Thread(target=second)
    first = threading.Thread(target=begin)
    first.start()
    assert inside.wait(10)
    first.join(10)
    other.join(10)
    assert warned == []
    assert warnings.filters == before
    with pytest.raises(UserWarning, match="as ever"):
        warnings.warn("as ever", stacklevel=1)


def test_one_is_not_counted_in_the_plural():
    assert [count_text(n, "group") for n in (0, 1, 2, 1000)] == [
        "0 groups",
        "1 group",
        "2 groups",
        "1,000 groups",
    ]
    assert [count_text(n, "class") for n in (1, 2)] == ["1 class", "2 classes"]
