"""Tests of which reports are a deadlock, and of the message about it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comm.schedules import executed
from hpcsgd.comm.deadlock import KEPT, Call, Deadlock, Need, Report, Table, Wait, names
from hpcsgd.comm.mailed_reports import MailedReports, decoded, encoded

SAME = "all ranks of a group have to make the same calls in the same order"


def blocked(channel: str, count: int, ranks: Sequence[int], text: str = "step 4", **counts: int) -> Report:
    return Report(True, (Wait(text, (Need(channel, count, ranks),)),), {channel: count, **counts})


def found(*reports: Report) -> Deadlock | None:
    table = Table()
    for rank, report in enumerate(reports):
        table.add(rank, report)
    return table.deadlock


@settings(max_examples=400)
@given(st.integers(0, 2**32))
def test_a_deadlock_is_found_if_and_only_if_there_is_one(seed: int) -> None:
    stuck, table = executed(random.Random(seed))
    assert (table.deadlock is not None) == bool(stuck)
    if table.deadlock is not None:
        assert set(table.deadlock.ranks) <= stuck


def test_schedules_deadlock_often_but_not_always() -> None:
    ends = [bool(executed(random.Random(seed))[0]) for seed in range(200)]
    assert 50 < sum(ends) < 150


def test_two_ranks_in_two_collectives() -> None:
    deadlock = found(blocked("a", 1, (0, 1), "clip (x)"), blocked("b", 1, (0, 1), "step 4 (y)"))
    assert deadlock is not None
    assert str(deadlock) == f"ranks wait for each other: rank 0 is in clip (x), rank 1 in step 4 (y): {SAME}"
    assert deadlock.ranks == (0, 1)


def test_a_cycle_of_three_is_reported_without_those_who_wait_for_it() -> None:
    deadlock = found(
        blocked("x", 1, (0, 1), "X"),
        blocked("a", 1, (1, 2), "A"), blocked("b", 1, (2, 3), "B"), blocked("c", 1, (3, 1), "C"),
    )  # fmt: skip
    assert deadlock is not None
    told = "rank 1 is in A, rank 2 in B, rank 3 in C"
    assert str(deadlock) == f"ranks wait for each other: {told}: {SAME}"
    assert deadlock.ranks == (0, 1, 2, 3)


def test_a_rank_that_has_left() -> None:
    left = Report(True, (), {"w": 7}, last="step 7")
    blocked_in_step_8 = blocked("w", 8, range(4), "step 8 (x)")
    assert str(found(left, left, blocked_in_step_8)) == (
        "ranks 0 and 1 have left after step 7, and rank 2 waits for them in step 8 (x): "
        "all ranks need the same number of batches, and the same calls"
    )
    assert (
        found(blocked("w", 7, range(2)), Report(True, (), {"w": 7}, last="")) is None
    )  # it has completed its part


def test_a_rank_that_waits_while_it_leaves() -> None:
    leaving = blocked("s", 1, (0, 1), "allreduce over 2 ranks")._replace(last="step 7")
    deadlock = found(leaving, blocked("w", 8, (0, 1), "step 8 (x)"))
    assert deadlock is not None
    assert str(deadlock).startswith("rank 0 has left after step 7, and rank 1 waits for it in step 8 (x): ")


def test_who_trains_is_reported_before_those_who_leave() -> None:
    leaving = blocked("s", 1, (0, 2), "allreduce over 2 ranks")._replace(last="step 7")
    deadlock = found(leaving, blocked("w", 8, (1, 2), "step 8 (x)"), Report(True, last="step 7"))
    assert str(deadlock).startswith("rank 2 has left after step 7, and rank 1 waits for it in step 8 (x): ")


def test_ranks_that_leave_and_miss_each_other() -> None:
    waits = blocked("s", 1, (0, 1), "allreduce over 2 ranks")._replace(last="step 7")
    assert str(found(waits, Report(True, last=""))) == (
        "rank 1 has left, and rank 0 waits for it in allreduce over 2 ranks: "
        "all ranks need the same number of batches, and the same calls"
    )


def test_a_chain_to_a_rank_that_computes_is_none() -> None:
    assert found(blocked("a", 1, (0, 1)), blocked("b", 1, (1, 2)), Report(False)) is None
    assert found(blocked("a", 1, (0, 1)), blocked("b", 1, (1, 2))) is None  # there is no report of rank 2


def test_all_waits_of_a_rank_have_to_be_in_vain() -> None:
    """Rank 0 waits for rank 1, which waits for it, and on another thread for rank 2, which computes."""
    two = Report(True, (*blocked("a", 1, (0, 1)).waits, *blocked("b", 1, (0, 2)).waits), {"a": 1, "b": 1})
    back = blocked("c", 1, (0, 1))
    assert found(two, back, Report(False)) is None
    assert found(two, back, Report(True, last="")) is not None


def test_a_rank_that_gets_on_is_in_none() -> None:
    table = Table()
    table.add(0, blocked("a", 1, (0, 1)))
    table.add(0, Report(False))
    table.add(1, blocked("b", 1, (0, 1)))
    assert table.deadlock is None


def test_different_calls_on_one_communicator() -> None:
    def report(**calls: str) -> Report:
        made = [Call(int(name[1:]), what, f"step {name[1:]} ({what})") for name, what in calls.items()]
        return blocked("a", made[-1].number, (0, 1, 2))._replace(calls={"a": made})

    same = report(_3="allreduce", _4="alltoall")
    assert found(same, same) is None
    told = "rank 2 began step 3 (bcast), rank 0 began step 3 (allreduce)"
    for other in (report(_3="bcast"), report(_2="bcast", _3="bcast", _4="alltoall")):
        assert str(found(same, same, other)) == f"ranks make different calls: {told}: {SAME}"


def test_few_calls_are_kept() -> None:
    table = Table()
    for number in range(1000):
        table.add(0, blocked("a", number, (0, 1))._replace(calls={"a": [Call(number, "x", "x")]}))
    assert list(table._calls["a"]) == list(range(1000 - KEPT, 1000))


def test_counts_that_a_report_leaves_out_are_the_same() -> None:
    table = Table()
    table.add(0, blocked("a", 3, (0, 1)))
    table.add(0, Report(False))
    assert table.missing([Need("a", 3, (0,))]) == []


def test_the_first_deadlock_is_the_one_that_is_reported() -> None:
    table = Table()
    table.add(0, blocked("a", 1, (0, 1)))
    table.add(1, blocked("b", 1, (0, 1)))
    first = table.deadlock
    assert first is not None
    table.add(2, blocked("a", 1, (0, 1, 2)))
    assert table.deadlock is first


def test_how_many_have_left() -> None:
    table = Table()
    table.add(0, blocked("a", 3, (0, 1, 2)))
    table.add(1, Report(True, last="step 4"))
    table.add(2, Report(False))
    assert table.left() == 1


def test_who_is_missing() -> None:
    table = Table()
    table.add(0, blocked("a", 3, (0, 1, 2)))
    table.add(1, blocked("a", 2, (0, 1, 2)))
    assert table.missing([Need("a", 3, (0, 1, 2))]) == [1, 2]


@pytest.mark.parametrize("ranks", [range(0, 4000, 4), (0, 3, 4)])
def test_reports_arrive_as_they_were_sent(ranks: Sequence[int]) -> None:
    calls = {"a/1.0": [Call(3, "allreduce", "step 4 (§)")]}
    report = blocked("a/1.0", 3, ranks, "step 4 (§)")._replace(calls=calls)
    assert decoded(encoded(report)) == report
    assert len(encoded(report)) < 250
    assert decoded(encoded(Report(True, last="step 4"))).last == "step 4"


class Outbox:
    """The messages that rank 1 sends."""

    rank = 1

    def __init__(self) -> None:
        self.sent: list[Report] = []

    def send(self, to: int, tag: int, told: bytes) -> None:
        self.sent.append(decoded(told))


def test_a_process_sends_what_has_changed() -> None:
    outbox = Outbox()
    reports = MailedReports(cast(Any, outbox), lambda _: None)
    calls = {"a": [Call(3, "allreduce", "step 4")], "b": [Call(1, "bcast", "step 1")]}
    for count in (3, 4):
        reports.add(1, blocked("a", count, (0, 1), b=1)._replace(calls=calls))
    reports.add(1, Report(False))
    assert [each.counts for each in outbox.sent] == [{"a": 3, "b": 1}, {"a": 4}, {}]
    assert [sorted(each.calls) for each in outbox.sent] == [["a", "b"], ["a"], []]
    assert [each.blocked for each in outbox.sent] == [True, True, False]


def test_names_of_many_ranks_are_not_reported() -> None:
    assert names([3]) == "rank 3"
    assert names([1, 2, 5]) == "ranks 1, 2 and 5"
    assert names(range(4096)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4088 more"
