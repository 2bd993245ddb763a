"""Connections that have sent nothing are closed once there are too many."""

from __future__ import annotations

import resource
from contextlib import ExitStack

import pytest

from hpcsgd.elastic.pending_connections import PendingConnections


def test_the_oldest_is_sent_away_for_each_one_too_many() -> None:
    strangers, sent_away = PendingConnections(2), []
    with ExitStack() as here:
        first, second, third = ExitStack(), ExitStack(), ExitStack()
        for number, stack in enumerate((first, second, third)):
            here.enter_context(stack)
            stack.enter_context(strangers.one_more(lambda number=number: sent_away.append(number)))
        assert (sent_away, len(strangers)) == ([0], 2)
        second.close()
        assert len(strangers) == 1
        first.close()  # it was no longer pending
        with strangers.one_more(lambda: sent_away.append(3)):
            assert (sent_away, len(strangers)) == ([0], 2)
    assert (sent_away, len(strangers)) == ([0], 0)


@pytest.mark.parametrize(("files", "most"), [(6, 3), (1, 1), (resource.RLIM_INFINITY, 1024)])
def test_they_take_half_of_the_open_files(monkeypatch: pytest.MonkeyPatch, files: int, most: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (files, files))
    strangers = PendingConnections()
    with ExitStack() as here:
        for _ in range(most + 2):
            here.enter_context(strangers.one_more(lambda: None))
        assert len(strangers) == most
