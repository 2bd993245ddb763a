"""Rounds that a quorum of groups completes without the others."""

from __future__ import annotations

import logging
import threading

import pytest
import torch

import hpcsgd
from elastic.conftest import Desk
from elastic.test_elastic_average import mean_of, replica_groups, start_values
from elastic.test_outer_ensemble import Moved
from hpcsgd.comm import Communicator
from hpcsgd.core.waits import Living, Quorum
from hpcsgd.elastic.arrivals import Arrivals
from hpcsgd.elastic.elastic_average import ElasticAverage
from hpcsgd.elastic.register import Member, Phase, Register
from hpcsgd.errors import UserError
from hpcsgd.methods import ensemble_sync

MEMBERS = (Member(0, ("a", "b"), 5), Member(1, ("c",), 5), Member(3, ("d",), 5), Member(4, ("e",), 2))
NOW = Register(generation=2, rounds=5, began=5, phase=Phase.RUN, members=MEMBERS)
"""Group 4 has missed rounds, so that it does not count in this one."""
WHY = "it did not arrive within 4 s after the quorum of 2"


def arrived(*ranks: tuple[int, int], timeout: float = 100.0, quorum: int | None = 2) -> Arrivals:
    """Return arrivals of which the n-th one came at second n."""
    arrivals = Arrivals(timeout, quorum, 4.0)
    for second, (replica_group, rank) in enumerate(ranks):
        arrivals.add(replica_group, rank, NOW, float(second))
    return arrivals


def test_grace_begins_with_the_last_rank_of_the_quorum() -> None:
    arrivals = arrived((0, 0), (1, 0), (4, 0), (0, 1))
    assert arrivals.late(NOW, 7.0, since=0.0) == {}
    assert arrivals.late(NOW, 7.1, since=0.0) == {3: WHY}
    arrivals.add(3, 0, NOW, 7.2)
    assert arrivals.are_all(NOW)
    assert arrivals.late(NOW, 90.0, since=0.0) == {}


def test_grace_does_not_begin_again_with_further_groups() -> None:
    arrivals = arrived((1, 0), (3, 0), (0, 0))
    assert arrivals.late(NOW, 5.1, since=0.0) == {0: WHY, 4: WHY}, "group 0 with one of its two ranks"


def test_groups_that_do_not_count_are_no_part_of_a_quorum() -> None:
    arrivals = arrived((4, 0), (1, 0))
    assert arrivals.late(NOW, 99.0, since=0.0) == {}
    assert arrivals.late(NOW, 101.0, since=0.0) == dict.fromkeys((0, 3), "it did not arrive within 100 s")


def test_without_a_quorum_only_the_timeout_ends_a_wait() -> None:
    arrivals = arrived((0, 0), (0, 1), (1, 0), (4, 0), quorum=None)
    assert arrivals.late(NOW, 100.0, since=0.0) == {}
    assert arrivals.late(NOW, 100.1, since=0.0) == {3: "it did not arrive within 100 s"}


def test_each_round_begins_anew() -> None:
    arrivals = arrived((0, 0), (0, 1), (1, 0))
    arrivals.clear()
    assert not arrivals.have_begun(NOW)
    assert arrivals.late(NOW, 999.0, since=0.0) == {}, "all groups still train"
    arrivals.add(1, 0, NOW, 50.0)
    assert arrivals.late(NOW, 99.0, since=50.0) == {}


def test_an_open_register_waits_as_long_as_a_round() -> None:
    """It waits from the first group on that is ready, and from the quorum."""
    for quorum, waits in ((None, 100.0), (2, 4.0)):
        arrivals = Arrivals(100.0, quorum, 4.0)
        assert not arrivals.suffice(NOW, 0, 500.0, since=0.0), "all that count still train"
        assert not arrivals.suffice(NOW, 2, 500.0, since=0.0)
        assert not arrivals.suffice(NOW, 2, 500.0 + waits, since=0.0)
        assert arrivals.suffice(NOW, 2, 500.1 + waits, since=0.0)
        assert not arrivals.suffice(NOW, 0, 501.0 + waits, since=0.0), "they died"
        assert not arrivals.suffice(NOW, 1, 600.0 + waits, since=0.0)


def test_a_quorum_does_not_begin_a_training() -> None:
    arrivals, start = arrived(quorum=2), Register()
    assert not arrivals.suffice(start, 2, 0.0, since=0.0)
    assert not arrivals.suffice(start, 2, 100.0, since=0.0)
    assert arrivals.suffice(start, 2, 100.1, since=0.0)


@pytest.mark.parametrize("ranks", [(1, 1, 1), (2, 1, 3)])
def test_two_of_three_go_on_and_the_third_comes_back(
    desk: Desk, ranks: tuple[int, int, int], caplog: pytest.LogCaptureFixture
) -> None:
    gone_on = threading.Event()
    caplog.set_level(logging.WARNING)

    def body(g: int, group: Communicator, average: ElasticAverage) -> list[tuple[torch.Tensor, ...]]:
        average.mean(start_values(g))
        if g == 2:
            assert gone_on.wait(60)
            w = start_values(100)
            average.mean(w)
            found = [tuple(w)]
            assert average.rounds > 2
        else:
            w = start_values(g)
            average.mean(w)
            found = [tuple(x.clone() for x in w)]
            assert (average.rounds, average.counted) == (2, (0, 1))
            gone_on.set()
            while 2 not in average.members:
                average.mean(w)
            found.append(tuple(w))
        after = start_values(g + 10)
        average.mean(after)
        assert average.counted == (0, 1, 2)
        return [*found, tuple(after)]

    with desk.coordinator(3, quorum=2, grace=0.2) as at:
        first, second, late = replica_groups(at, ranks, body)
    for without, back, _ in [*first, *second]:
        for mean in (without, back):
            for x, y in zip(mean, mean_of((0, 1)), strict=True):
                torch.testing.assert_close(x, y)
    for back, _ in late:
        assert all(torch.equal(x, y) for x, y in zip(back, first[0][1], strict=True)), (
            "what it had is dropped"
        )
    for *_, after in [*first, *second, *late]:
        for x, y in zip(after, mean_of((10, 11, 12)), strict=True):
            torch.testing.assert_close(x, y)
    lost = [event for event in desk.events() if event["event"] == "lost"]
    assert [(event["replica_group"], event["kind"], event["why"]) for event in lost[:1]] == [
        (2, "late", "it did not arrive within 0.2 s after the quorum of 2")
    ]
    assert "without what this group learned since synchronization 1: " in caplog.text


def test_a_late_group_takes_the_others_outer_state(desk: Desk) -> None:
    """Its own change of the model is not part of the outer step, and afterwards it has the others' bits."""
    gone_on = threading.Event()

    def nesterov(parameters: object) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)  # pyright: ignore[reportArgumentType]

    def body(g: int, group: Communicator, alive: ElasticAverage) -> torch.Tensor:
        moved = Moved(group, alive, torch.float64, outer=nesterov, quorum=2, grace_s=0.2)
        moved.by(1.0)
        if g == 2:
            assert gone_on.wait(60)
            moved.by(1000.0)
        else:
            moved.by(2.0)
            gone_on.set()
            while 2 not in alive.members:
                moved.by(0.0)
        t = alive.after.place.t
        moved.optimizer.resume_from(t, [{} for _ in moved.optimizer.param_groups], None)
        return moved.by(1.0)

    with desk.coordinator(3, quorum=2, grace=0.2) as at:
        found = [one for of_group in replica_groups(at, (1, 2, 1), body) for one in of_group]
    assert all(torch.equal(one, found[0]) for one in found)
    assert found[0].abs().max() < 100


def test_the_method_says_what_is_enough() -> None:
    for guard in (None, hpcsgd.PseudoGradientPenalty()):
        for outer in (None, lambda ws: torch.optim.SGD(ws, lr=1.0)):
            method = ensemble_sync(8, guard=guard, outer=outer, quorum=3, grace_s=1.5)
            assert method.averager.traits.waits == Living(quorum=Quorum(3, 1.5))
    assert ensemble_sync(8).averager.traits.waits == Living()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"quorum": 2}, "quorum: it needs grace_s as well"),
        ({"grace_s": 2.0}, "grace_s: it needs quorum as well"),
        ({"quorum": 0, "grace_s": 2.0}, "quorum = 0: expected at least 1"),
        ({"quorum": 2, "grace_s": 0.0}, "grace_s = 0: expected more than 0"),
    ],
)
def test_what_is_refused(given: dict[str, float], told: str) -> None:
    with pytest.raises(UserError, match=f"^{told}"):
        ensemble_sync(8, **given)  # pyright: ignore[reportArgumentType]
