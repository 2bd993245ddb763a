"""Groups that do not wait for slow ones: timelines computed by hand, and the same order as real groups."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.random import Generator

from elastic.conftest import Desk, desk, wait_for
from hpcsgd.core.waits import Living, Quorum
from hpcsgd.elastic.client import Client
from hpcsgd.elastic.coordinator import Coordinator
from hpcsgd.elastic.register import Register
from hpcsgd.errors import UserError
from hpcsgd.performance.simulation import (
    Constant,
    Durations,
    Failures,
    Layout,
    LogNormal,
    Simulated,
    Simulation,
    report,
    simulate,
)
from hpcsgd.performance.simulation.compute import Compute
from hpcsgd.performance.simulation.picture import draw
from hpcsgd.performance.simulation.rules import Ensemble, EnsembleWithQuorum, rule_of
from hpcsgd.performance.simulation.rules import ensemble_with_quorum as module
from hpcsgd.performance.simulation.simulated_run import SimulatedRun
from in_parallel import at_once
from train.replica_groups_of_threads import NO_NORM, Life, World
from train.test_ensemble import job_file

__all__ = ["desk", "job_file"]

ENOUGH = Quorum(groups=2, grace=0.5, late_rounds=2)
TWO, THREE, FOUR = (0, 1), (0, 1, 2), (0, 1, 2, 3)
Sync = tuple[int, float, float, tuple[int, ...], tuple[int, ...]]


class Slower:
    """Stragglers whose factors are given, one for each rank, or a row of them for each two steps."""

    def __init__(self, *rows: Sequence[float]) -> None:
        self._rows = [np.array(row) for row in rows for _ in range(2)]

    def factors(self, steady: Generator, anew: Generator, n: int) -> np.ndarray:
        return self._rows.pop(0) if len(self._rows) > 1 else self._rows[0]


def simulated(*factors: float, quorum: Quorum = ENOUGH, steps: int = 12, **more: Any) -> Simulated:
    """Simulate groups of one rank that compute `factors` seconds per step, and average for half a second."""
    given: dict[str, Any] = {"durations": Durations(model_average=0.5), "stragglers": Slower(factors), **more}
    return simulate(
        Simulation(
            layout=Layout(len(factors), 1), compute=Constant(1.0), steps=steps,
            waits=Living(2, quorum), **given,
        )
    )  # fmt: skip


def syncs(found: Simulated) -> list[Sync]:
    return [(s.t, round(s.begin, 9), round(s.end, 9), s.members, s.counted) for s in found.syncs]


def assert_adds_up(found: Simulated, *ended: float) -> None:
    """Check that the groups ended at these times, and that their seconds by cause are those of each group."""
    spent = sum(found.stats.totals().values())
    assert spent == pytest.approx(sum(ended))
    assert found.seconds == pytest.approx(max(ended))
    assert all(seconds.min() > -1e-9 for seconds in found.stats.seconds.values())


ON_AND_OFF: list[Sync] = [
    (2, 2.5, 3.0, TWO, TWO),  # 0 and 1 arrive at 2.0, the grace time is over at 2.5
    (4, 5.0, 5.5, TWO, TWO),  # 2 asks at 5.2 to return, while this average is made
    (6, 7.5, 8.0, THREE, THREE),
    (8, 10.5, 11.0, TWO, TWO),
    (10, 13.0, 13.5, TWO, TWO),
    (12, 15.5, 16.0, THREE, THREE),
]


def test_a_slow_group_is_left_out_of_two_and_takes_part_in_the_third() -> None:
    found = simulated(1.0, 1.0, 2.6)
    assert syncs(found) == ON_AND_OFF
    assert_adds_up(found, 16.0, 16.0, 16.0)
    assert found.stats.count.tolist() == [3, 3, 2, 2, 2, 2, 3, 3, 2, 2, 2, 2]
    assert (found.lost, found.stats.useful) == (0.0, 28)
    assert found.stats.seconds["for other groups"].sum() == pytest.approx(2 * (0.5 + 0.5) + 2 * 2.3)
    assert report.lines(found)[5] == "late      left out of synchronizations 4 times, 0.0% of steps lost"


@pytest.mark.parametrize("late_rounds", [0, 1])
def test_work_that_is_too_late_is_lost(late_rounds: int) -> None:
    found = simulated(1.0, 1.0, 2.6, quorum=replace(ENOUGH, late_rounds=late_rounds))
    assert syncs(found) == [(t, begin, end, members, TWO) for t, begin, end, members, _ in ON_AND_OFF]
    assert found.stats.lost.tolist() == [1, 1, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0]
    assert found.lost == 4 / 28
    assert found.samples_per_second == pytest.approx(24 / 16.0)
    assert report.lines(found)[5].endswith("14.3% of steps lost")


def test_one_who_misses_the_end_of_an_epoch_looks_on_until_samples_are_assigned() -> None:
    """Group 2 is away after step 4, and back after step 6. The epoch of the other two has six steps."""
    found = simulated(1.0, 1.0, 2.6, steps_per_epoch=4)
    assert syncs(found) == [
        *ON_AND_OFF[:3],
        (8, 10.0, 10.5, THREE, TWO),
        (10, 12.5, 13.0, THREE, TWO),  # here samples are assigned to all
        (12, 15.5, 16.0, TWO, TWO),  # 2 is ready at 18.2
    ]
    assert found.stats.count.tolist() == [3, 3, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3]
    assert found.stats.lost.tolist() == [0] * 10 + [1, 1]
    assert_adds_up(found, 16.0, 16.0, 18.2)


def test_an_epoch_ends_with_a_synchronization() -> None:
    found = simulated(1.0, 1.0, 1.0, steps=7, steps_per_epoch=5)
    assert [sync.t for sync in found.syncs] == [2, 4, 5, 6, 7]


def test_fragments_synchronize_in_turn() -> None:
    """Two fragments that synchronize every three steps: after ⌈1.5·n⌉ steps, with a quorum and without."""
    for quorum in (None, replace(ENOUGH, groups=3)):
        found = SimulatedRun(Compute(Layout(3, 1), Constant(1.0)), Durations(model_average=0.5), 8)
        rule_of(Living(Fraction(3, 2), quorum)).run(found)
        assert found.stats.seconds["model_average"].tolist() == [0.0, 1.5, 1.5, 0.0, 1.5, 1.5, 0.0, 1.5]


def test_who_is_late_at_the_end_ends_when_it_is_ready() -> None:
    found = simulated(1.0, 1.0, 10.0, steps=4)
    assert syncs(found) == ON_AND_OFF[:2]
    assert_adds_up(found, 5.5, 5.5, 20.0)
    assert found.stats.lost.tolist() == [1, 1, 0, 0]


def test_all_wait_for_each_other_when_one_returns() -> None:
    """Group 3 asks to return at 7.8. So after step 8 group 2 is waited for, which is ready at 13.2."""
    found = simulated(1.0, 1.0, 2.6, 3.9, steps=8)
    assert syncs(found) == [
        *ON_AND_OFF[:3],
        (8, 13.2, 13.7, FOUR, THREE),  # 3 missed three synchronizations, and may miss two
    ]
    assert_adds_up(found, 13.7, 13.7, 13.7, 13.7)
    assert found.stats.lost.tolist() == [1, 1, 0, 0, 0, 0, 0, 0]


def test_one_that_returns_is_back_at_once_when_another_one_is_left_out() -> None:
    """Group 3 asks at 5.2 to return, while 0 and 1 wait for group 2, which they leave out at 5.5."""
    rounds = Slower((1.0, 1.0, 1.0, 2.6), (1.0, 1.0, 4.0, 1.0))
    found = simulated(1.0, 1.0, 1.0, 1.0, steps=4, stragglers=rounds)
    assert syncs(found) == [(2, 2.5, 3.0, THREE, THREE), (4, 5.5, 6.0, (0, 1, 3), (0, 1, 3))]
    assert_adds_up(found, 6.0, 6.0, 11.0, 6.0)
    assert found.stats.count.tolist() == [4, 4, 3, 3]
    assert found.stats.lost.tolist() == [0, 0, 1, 1]


def test_grace_that_is_long_enough_leaves_nobody_out() -> None:
    found = simulated(1.0, 1.0, 2.6, quorum=replace(ENOUGH, grace=3.3))
    assert [sync.begin for sync in found.syncs] == pytest.approx([5.7 * n + 5.2 for n in range(6)])
    assert all(sync.counted == THREE for sync in found.syncs)
    found = simulated(1.0, 1.0, 2.6, quorum=replace(ENOUGH, grace=3.1))
    assert found.syncs[0].members == TWO


@pytest.mark.parametrize("quorum", [Quorum(1, 1e9), Quorum(5, 1e-9)])
@pytest.mark.parametrize("per_epoch", [None, 5, 6])
def test_without_late_groups_it_is_ensemble_sync_without_a_quorum(
    quorum: Quorum, per_epoch: int | None
) -> None:
    d = Durations(grad_reduce=0.011, update=0.003, model_average=0.04, gather=0.007)
    for seed in range(4):
        compute = Compute(Layout(5, 2), LogNormal(0.1, 0.4), seed=seed)
        mine, other = (SimulatedRun(compute, d, 13, steps_per_epoch=per_epoch) for _ in range(2))
        EnsembleWithQuorum(3, quorum).run(mine)
        Ensemble(3).run(other)
        np.testing.assert_allclose(mine.ended, other.ended, rtol=1e-12)
        assert mine.stats.totals() == pytest.approx(other.stats.totals())


@pytest.mark.parametrize(("P", "K"), [(1, 2), (2, 1), (7, 3)])
@pytest.mark.parametrize("late_rounds", [0, 1, 3])
def test_seconds_add_up_whoever_is_late(P: int, K: int, late_rounds: int) -> None:
    d = Durations(grad_reduce=0.011, update=0.003, model_average=0.04, gather=0.007)
    quorum = Quorum(1 + P // 2, 0.05, late_rounds)
    for seed in range(6):
        course = SimulatedRun(
            Compute(Layout(P, K), LogNormal(0.1, 1.0), seed=seed), d, 50, steps_per_epoch=11
        )
        EnsembleWithQuorum(3, quorum).run(course)
        stats, steps = course.stats, [sync.t for sync in course.syncs]
        assert sum(stats.totals().values()) == pytest.approx(course.ended.sum())
        assert all(seconds.min() > -1e-9 for seconds in stats.seconds.values())
        assert (stats.count <= P).all()
        assert (stats.count >= quorum.groups).all()
        assert (stats.lost <= stats.count).all()
        assert steps == sorted({*steps, *range(3, 50, 3), 50})
        assert all(len(sync.counted) >= quorum.groups for sync in course.syncs)
        away = sum(len(sync.members) < P for sync in course.syncs)
        assert away == 0 if P <= 2 else 0 < away < len(steps)
        if P <= 2:
            assert steps == sorted({*range(3, 50, 3), *range(11, 50, 11), 50})


def test_it_is_drawn_and_written(tmp_path: Path) -> None:
    found = simulated(1.0, 1.0, 2.6)
    draw(found, tmp_path / "job.png")
    told = json.loads(json.dumps(report.record(found)))
    first = {"t": 2, "begin": 2.5, "end": 3.0, "members": [0, 1], "counted": [0, 1]}
    assert (told["lost"], told["syncs"][0]) == (0.0, first)


def test_what_is_refused() -> None:
    with pytest.raises(UserError, match=r"^\[method\]: quorum = 4: expected at most the number of groups, 3"):
        simulated(1.0, 1.0, 1.0, quorum=Quorum(4, 1.0))
    with pytest.raises(UserError, match=r"^\[method\]: quorum = 2: failures are simulated only without it"):
        simulated(1.0, 1.0, failures=Failures(1e6, checkpoint_seconds=1.0))
    with pytest.raises(UserError, match=r"^steps_per_epoch = 0: expected 1 or more"):
        simulated(1.0, 1.0, steps_per_epoch=0)


GRACE = 600.0
"""Seconds; longer than any machine delays a thread. The test lets this time pass."""
QUORUM = ["--method.quorum", "2", "--method.grace_s", str(GRACE), "--method.late_rounds", "2"]
OUTER = ["--method.outer", "{name='SGD', lr=0.7, momentum=0.9, nesterov=true}", "--method.sync_every", "2"]


def order_of(monkeypatch: pytest.MonkeyPatch, *factors: float) -> tuple[Simulated, list[tuple[str, int]]]:
    """Return a simulation of three epochs, of eight steps if all have samples, and its events in their order.

    An event is "trained" or "looks on", with the group that arrives; or "over" and "averaged".
    """
    events: list[tuple[str, int]] = []
    ends: list[int] = []
    groups: Any = module._Groups
    arrive, leave_out, average = groups._arrive, groups._leave_out, groups._synchronize

    def arrived(self: Any, g: int) -> None:
        events.append(("trained" if self._first[g] < self._t[g] else "looks on", g))
        arrive(self, g)

    def over(self: Any) -> None:
        before = self._membership.register.generation
        leave_out(self)
        if self._membership.register.generation > before:
            events.append(("over", 0))

    def averaged(self: Any) -> None:
        average(self)
        events.append(("averaged", 0))
        place = self._membership.register.place
        if place.epoch == 3:
            ends.append(place.t)

    with monkeypatch.context() as patched:
        patched.setattr(groups, "_arrive", arrived)
        patched.setattr(groups, "_leave_out", over)
        patched.setattr(groups, "_synchronize", averaged)
        simulated(*factors, steps=100, steps_per_epoch=8)
        events.clear()
        found = simulated(*factors, steps=ends[0], steps_per_epoch=8)
    return found, events


class Director:
    """Lets the groups of a real training arrive, leave others out, and end averages in a given order."""

    def __init__(self, at: Coordinator, events: Sequence[tuple[str, int]], groups: int) -> None:
        self._at, self._events = at, events
        self._may, self._have = [0] * groups, [0] * groups
        """How often each group may arrive with new work, and has done so."""
        self._rounds = 1
        """The number of rounds that may be committed."""

    def before_step(self, g: int, t: int) -> None:
        """Wait before the last step of a round until group `g` may arrive."""
        if t % 2:
            wait_for(lambda: self._may[g] > self._have[g])
            self._have[g] += 1

    def before_vote(self, rounds: int) -> None:
        """Wait until the round after `rounds` rounds may be committed."""
        wait_for(lambda: rounds < self._rounds)

    def direct(self) -> None:
        wait_for(lambda: self._at.register.rounds == 1)
        for what, g in self._events:
            if what == "averaged":
                self._rounds += 1
                wait_for(lambda: self._at.register.rounds == self._rounds)
            elif what == "over":
                generation = self._at.register.generation
                wait_for(lambda: self._at._arrivals._enough_since is not None)
                assert self._at._arrivals._enough_since is not None
                self._at._arrivals._enough_since -= GRACE + 1
                wait_for(lambda generation=generation: self._at.register.generation > generation)
            else:
                self._may[g] += what == "trained"
                wait_for(lambda g=g: self._has_arrived(g))
        self._may = [1000] * len(self._may)

    def _has_arrived(self, g: int) -> bool:
        candidate = self._at.membership._candidates.get(g)
        return (g, 0) in self._at._arrivals._ranks or (candidate is not None and candidate.complete)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factors", "kinds"),
    [((1.0, 1.0, 2.6), {"looks on"}), ((1.0, 1.3, 4.1), set[str]()), ((2.3, 1.0, 1.0), {"looks on"})],
)
def test_real_groups_synchronize_in_the_simulated_order(
    job_file: Path,
    tmp_path: Path,
    desk: Desk,
    monkeypatch: pytest.MonkeyPatch,
    factors: tuple[float, ...],
    kinds: set[str],
) -> None:
    """The same groups average after the same steps, and nobody gets a sample a second time."""
    found, events = order_of(monkeypatch, *factors)
    assert {what for what, _ in events} == {"trained", "over", "averaged"} | kinds
    with desk.coordinator(3, quorum=2, grace=GRACE, late_rounds=2) as at:
        director, vote = Director(at, events, 3), Client.vote

        def held(client: Client, generation: int, rounds: int, *ballot: Any) -> Register:
            director.before_vote(rounds)
            return vote(client, generation, rounds, *ballot)

        monkeypatch.setattr(Client, "vote", held)
        world = World(at, job_file, tmp_path / "checkpoints", [*QUORUM, *OUTER, *NO_NORM])

        def live(g: int) -> list[Life]:
            return world.live(g, 3, before_step=lambda t: director.before_step(g, t))

        *lives, _ = at_once(lambda: live(0), lambda: live(1), lambda: live(2), director.direct)
    commits = [event for event in desk.events() if event["event"] == "commit"]
    real = [(event["t"], tuple(event["members"]), tuple(event["counted"])) for event in commits]
    assert real == [(0, THREE, THREE), *((sync.t, sync.members, sync.counted) for sync in found.syncs)]
    assert sum(life.steps for (life,) in lives) == found.stats.count.sum()
    for epoch in range(3):
        seen = [sample for (life,) in lives for sample in life.seen.get(epoch, [])]
        assert len(seen) == len(set(seen))
