"""Fragments of the model among groups that may die, compared with a plain program for one process."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hpcsgd
from elastic.conftest import HEARTBEAT_TIMEOUT, TOKEN, Desk, wait_for
from elastic.test_elastic_average import replica_groups
from elastic.test_late_work import GRACE, no_longer_waited_for
from elastic.test_outer_ensemble import ADAM, Moved
from hpcsgd.comm import Communicator, threads
from hpcsgd.core.optional import comm_ops
from hpcsgd.core.topology import form
from hpcsgd.core.traffic import BucketLayout, ModelLayout
from hpcsgd.core.waits import Living, Quorum
from hpcsgd.elastic import ring
from hpcsgd.elastic.elastic_average import ElasticAverage
from hpcsgd.elastic.rings import Rings
from hpcsgd.errors import UserError
from hpcsgd.parts.averagers import (
    NESTEROV,
    MakeOptimizer,
    MeanFrom,
    OuterElasticFragments,
    PseudoGradientPenalty,
    RadialDirectional,
    RadialDirectionalElasticMean,
)
from hpcsgd.parts.averagers.fragments import fragments
from hpcsgd.parts.averagers.outer_elastic_fragments import changed_fragments
from hpcsgd.parts.grad_reduces import Dense
from hpcsgd.parts.schedules.every import InTurn

LATE, DIES = 2, 1


class Died(Exception):
    """Raised in place of the death of a process."""


class Plain:
    """All groups in one process: models as vectors, of which fragments `masks` are synchronized."""

    def __init__(
        self,
        start: Tensor,
        masks: Sequence[Tensor],
        groups: int,
        make: MakeOptimizer,
        *,
        by_steps: bool = False,
    ) -> None:
        self._masks, self._by_steps = masks, by_steps
        self.w = [start.clone() for _ in range(groups)]
        self._theta = [nn.Parameter(start[mask].clone()) for mask in masks]
        self._outer = [make([theta]) for theta in self._theta]
        self._base = [[start[mask].clone() for mask in masks] for _ in range(groups)]
        """For each group and fragment, the θ that it has seen last."""
        self._steps = [[0 for _ in masks] for _ in range(groups)]
        """For each group and fragment, the steps in its change."""

    def move(self, g: int, change: float) -> None:
        self.w[g] += change
        self._steps[g] = [steps + 1 for steps in self._steps[g]]

    def synchronize(self, fragment: int | None, present: Sequence[int], counted: Sequence[int]) -> None:
        """Synchronize the groups `present`, of which those in `counted` count; None: all fragments."""
        for g in present:
            self._catch_up(g, counts=g in counted)
        for p in range(len(self._masks)):
            if fragment in (None, p):
                self._theta[p].grad = self._theta[p].detach() - self._mean(p, counted)
                self._outer[p].step()
                for g in present:
                    self._take(g, p)

    def _catch_up(self, g: int, *, counts: bool) -> None:
        """Take the θ of fragments that were synchronized without group `g`; add its changes if it counts."""
        for p, mask in enumerate(self._masks):
            if not torch.equal(self._base[g][p], self._theta[p]):
                change = self.w[g][mask] - self._base[g][p] if counts else 0.0
                steps = self._steps[g][p] if counts else 0
                self._take(g, p)
                self.w[g][mask] += change
                self._steps[g][p] = steps

    def _mean(self, p: int, counted: Sequence[int]) -> Tensor:
        steps = [self._steps[g][p] for g in counted]
        weights = steps if self._by_steps and any(steps) else [1 for _ in counted]
        models = (weight * self.w[g][self._masks[p]] for g, weight in zip(counted, weights, strict=True))
        return torch.stack(list(models)).sum(0) / sum(weights)

    def _take(self, g: int, p: int) -> None:
        self._steps[g][p] = 0
        self._base[g][p] = self._theta[p].detach().clone()
        self.w[g][self._masks[p]] = self._base[g][p]


def masks_of(optimizer: hpcsgd.DistributedOptimizer, F: int) -> list[Tensor]:
    """Return, for each fragment, which elements of `whole(optimizer)` belong to it."""
    found = []
    for fragment in fragments(optimizer.buckets, F, whole=True):
        mask = [torch.zeros(b.parameters.numel(), dtype=torch.bool) for b in optimizer.buckets]
        for of_bucket, cuts in zip(mask, fragment.cuts, strict=True):
            for cut in cuts:
                of_bucket[cut] = True
        found.append(torch.cat(mask))
    return found


def whole(optimizer: hpcsgd.DistributedOptimizer) -> Tensor:
    return torch.cat([b.parameters for b in optimizer.buckets]).clone()


def start_of(desk: Desk, F: int) -> tuple[Tensor, list[Tensor]]:
    """Return the model before the first step, and the masks of F fragments."""

    def body(g: int, group: Communicator, alive: ElasticAverage) -> tuple[Tensor, list[Tensor]]:
        moved = Moved(group, alive, torch.float64)
        return whole(moved.optimizer), masks_of(moved.optimizer, F)

    with desk.coordinator(1) as at:
        ((found,),) = replica_groups(at, (1,), body)
    return found


def due(t: int, I: int, F: int) -> int | None:  # noqa: E741 - the papers' letter
    """Return the fragment that is synchronized after step t, by the definition in Streaming DiLoCo."""
    return next((p for p in range(F) if (t + p * I // F) % I == 0), None)


CHANGES = [
    [1.0, 2.0, -1.0, 0.5, 3.0, 1.0, -2.0, 0.5, 1.5],
    [2.0, 2.0, -4.0, 1.5, 0.0, 2.0, 1.0, 0.5, 2.5],
    [6.0, -1.0, 2.0, 1.0, -3.0, 3.0, 1.0, 2.0, -1.5],
]


@pytest.mark.parametrize("make", [NESTEROV, ADAM])
@pytest.mark.parametrize("ranks", [(1, 1, 1), (2, 1, 3)])
@pytest.mark.parametrize(("every", "F"), [(3, 2), (4, 3), (2, 2), (3, 1)])
def test_the_steps_are_those_of_one_process(
    desk: Desk, ranks: tuple[int, ...], every: int, F: int, make: MakeOptimizer
) -> None:
    start, masks = start_of(desk, F)
    method = None if F > 1 else single(every, make)

    def body(g: int, group: Communicator, alive: ElasticAverage) -> list[Tensor]:
        how: dict[str, Any] = {"sync_every": every, "num_fragments": F, "outer": make}
        moved = Moved(group, alive, torch.float64, **({"method": method()} if method else how))
        found = []
        for change in CHANGES[g]:
            moved.by(change)
            found.append(whole(moved.optimizer))
        moved.optimizer.average_models()
        return [*found, whole(moved.optimizer)]

    plain = Plain(start, masks, 3, make)
    expected: list[list[Tensor]] = []
    for t in range(1, 10):
        for g in range(3):
            plain.move(g, CHANGES[g][t - 1])
        if (fragment := due(t, every, F)) is not None:
            plain.synchronize(fragment, range(3), range(3))
        expected.append([w.clone() for w in plain.w])
    with desk.coordinator(3) as at:
        found = replica_groups(at, ranks, body)
    for g, of_group in enumerate(found):
        for of_rank in of_group:
            for t, (model, models) in enumerate(zip(of_rank, expected, strict=False), start=1):
                torch.testing.assert_close(model, models[g], msg=f"group {g}, step {t}")
            assert torch.equal(of_rank[-1], found[0][0][-1]), "the last synchronization has all fragments"


def single(every: int, make: MakeOptimizer, merge: RadialDirectional | None = None) -> Callable[[], Any]:
    """Return a function that makes the method with one fragment, as `ensemble_sync` itself never does."""
    turn = InTurn(every, 1)

    def method() -> hpcsgd.Method:
        inner = MeanFrom() if merge is None else RadialDirectionalElasticMean(merge)
        return hpcsgd.Method(Dense(), turn, OuterElasticFragments(inner, make, None, turn))

    return method


@pytest.mark.parametrize("make", [NESTEROV, ADAM])
@pytest.mark.parametrize("merge", [None, RadialDirectional()])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_one_fragment_is_the_whole_model(
    desk: Desk, make: MakeOptimizer, merge: RadialDirectional | None, dtype: torch.dtype
) -> None:
    """The bits are those of the method without fragments."""

    def course(**how: Any) -> list[list[Tensor]]:
        def body(g: int, group: Communicator, alive: ElasticAverage) -> list[Tensor]:
            given = {name: value() if name == "method" else value for name, value in how.items()}
            moved = Moved(group, alive, dtype, **given)
            return [moved.by(change) for change in CHANGES[g]]

        with desk.coordinator(3) as at:
            return [one for of_group in replica_groups(at, (2, 1, 3), body) for one in of_group]

    expected = course(sync_every=2, outer=make, merge=merge)
    found = course(method=single(2, make, merge))
    for mine, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(mine, theirs, strict=True))


def test_radial_directions_are_those_of_each_fragment(desk: Desk) -> None:
    """All tensors move in one direction here, so that the average is the plain mean."""
    alike = [[abs(x) + 0.5 for x in course] for course in CHANGES]
    outcome = []
    for merge in (None, RadialDirectional()):

        def body(
            g: int, group: Communicator, alive: ElasticAverage, merge: RadialDirectional | None = merge
        ) -> list[Tensor]:
            moved = Moved(
                group, alive, torch.float64, sync_every=3, num_fragments=3, outer=NESTEROV, merge=merge
            )
            return [moved.by(change) for change in alike[g]]

        with desk.coordinator(3) as at:
            outcome.append([one for of_group in replica_groups(at, (1, 2, 1), body) for one in of_group])
    for mine, theirs in zip(*outcome, strict=True):
        for x, y in zip(mine, theirs, strict=True):
            torch.testing.assert_close(x, y)


class Story:
    """Three groups that synchronize one of F fragments after each step; group `LATE` misses some rounds."""

    def __init__(
        self,
        desk: Desk,
        F: int,
        missed: range,
        ranks: Sequence[int],
        late_rounds: int,
        tokens_per_step: float | None = None,
    ) -> None:
        self.F, self._missed, self._ranks, self._late_rounds = F, missed, ranks, late_rounds
        self._desk, self._tokens_per_step = desk, tokens_per_step
        self.disturbed: int | None = None
        """The group whose θ changes by a rounding error before the late group returns."""
        self.rounds = 9
        self.plain = Plain(*start_of(desk, F), 3, NESTEROV, by_steps=tokens_per_step is not None)

    def expected(self) -> dict[tuple[int, int], Tensor]:
        """Return the model of each group after each round, by (round, group)."""
        found: dict[tuple[int, int], Tensor] = {}
        for t in range(1, self.rounds + 1):
            away = [LATE] if t in self._missed else []
            here = [g for g in range(3) if g not in away]
            for g in range(3):
                if g != LATE or t <= self._missed.start or t > self._missed.stop:
                    self.plain.move(g, CHANGES[g][t - 1])
            too_late = t == self._missed.stop and len(self._missed) > self._late_rounds
            counted = [g for g in here if g != LATE or not too_late]
            self.plain.synchronize(due(t, self.F, self.F), here, counted)
            found |= {(t, g): self.plain.w[g].clone() for g in here}
        return found

    def found(self) -> list[dict[tuple[int, int], Tensor]]:
        """Return the same of every rank. The late group makes one step while it misses rounds."""

        def body(g: int, group: Communicator, alive: ElasticAverage) -> dict[tuple[int, int], Tensor]:
            how: dict[str, Any] = {"quorum": 2, "grace_s": GRACE, "late_rounds": self._late_rounds}
            how |= {"sync_every": self.F, "num_fragments": self.F, "outer": NESTEROV}
            how |= {"tokens_per_step": self._tokens_per_step}
            moved = Moved(group, alive, torch.float64, **how)
            found: dict[tuple[int, int], Tensor] = {}
            t = 1
            while t <= self.rounds:
                self._wait(at, g, t, group)
                if g == LATE and t == self._missed.start:
                    wait_for(lambda: at.register.rounds == self._missed.stop - 2)
                if g == self.disturbed and t == self._missed.stop:
                    disturb(moved.optimizer)
                moved.by(CHANGES[g][t - 1])
                t = alive.after.place.t
                moved.optimizer.resume_from(t, [{} for _ in moved.optimizer.param_groups], None)
                found[t, g] = whole(moved.optimizer)
                t += 1
            return found

        grace = {"quorum": 2, "grace": GRACE, "late_rounds": self._late_rounds}
        with self._desk.coordinator(3, **grace) as at:
            return [one for of_group in replica_groups(at, self._ranks, body) for one in of_group]

    def _wait(self, at: Any, g: int, t: int, group: Communicator) -> None:
        """Let the grace time pass in the first missed round; let the late group ask before the last one."""
        if g == LATE and t == self._missed.start:
            no_longer_waited_for(at, group)
        if g != LATE and t == self._missed.stop - 1:
            wait_for(lambda: LATE in at.membership.expected)


@pytest.mark.parametrize(
    ("ranks", "tokens_per_step"), [((1, 1, 1), None), ((2, 1, 3), None), ((2, 1, 3), 2.0)]
)
@pytest.mark.parametrize("F", [2, 3, 4])
@pytest.mark.parametrize("late_rounds", [2, 1])
def test_a_late_group_brings_or_loses_what_it_missed_and_keeps_the_rest(
    desk: Desk, ranks: tuple[int, ...], tokens_per_step: float | None, F: int, late_rounds: int
) -> None:
    """It misses rounds 3 and 4. With two fragments it missed both, with four only half of them.

    By its tokens it weighs less than the others, which have made more steps meanwhile.
    """
    story = Story(desk, F, range(3, 5), ranks, late_rounds, tokens_per_step)
    expected = story.expected()
    for course in story.found():
        for place, model in course.items():
            torch.testing.assert_close(model, expected[place], msg=f"{place}")
        assert max(t for t, _ in course) == story.rounds
    commits = [event["counted"] for event in desk.events() if event["event"] == "commit"]
    others, back = [0, 1], [0, 1, 2] if late_rounds == 2 else [0, 1]
    assert commits[-9:] == [[0, 1, 2]] * 2 + [others] * 2 + [back] + [[0, 1, 2]] * 4


def disturb(optimizer: hpcsgd.DistributedOptimizer) -> None:
    """Move θ of all fragments by one unit in the last place."""
    averager = optimizer.method.averager
    assert isinstance(averager, OuterElasticFragments)
    for theta in (theta for outer in averager.outers for theta in outer.theta):
        theta.copy_(torch.nextafter(theta, torch.full_like(theta, math.inf)))


@pytest.mark.parametrize("late_rounds", [2, 1])
def test_a_rounding_error_in_theta_loses_no_change_when_another_group_returns(
    desk: Desk, late_rounds: int
) -> None:
    """Groups of other hardware may have another θ in the last bits."""
    story = Story(desk, 3, range(3, 5), (1, 1, 1), late_rounds)
    story.disturbed = 1
    expected = story.expected()
    for course in story.found():
        for place, model in course.items():
            torch.testing.assert_close(model, expected[place], msg=f"{place}")


def test_all_ranks_of_a_sharded_group_know_which_fragments_were_synchronized() -> None:
    """A rank may have no rows of a fragment, or rows that a synchronization has not changed."""

    def body(group: Communicator) -> list[list[bool]]:
        old = [[torch.zeros(3 - group.rank)], [torch.zeros(2)], [torch.zeros(2), torch.zeros(1 - group.rank)]]
        theta = [[x.clone() for x in fragment] for fragment in old]
        theta[0][0] += float(group.rank == 0)
        theta[2][1] += 1.0
        contexts: list[Any] = [
            SimpleNamespace(sharded=sharded, topology=form(group)) for sharded in (True, False)
        ]
        return [changed_fragments(old, theta, s) for s in contexts]

    found = threads.run(2, body)
    assert [together for together, _ in found] == [[True, False, True]] * 2
    assert [alone for _, alone in found] == [[True, False, True], [False, False, False]]


@pytest.mark.parametrize("ranks", [(1, 1, 1), (2, 1, 3)])
def test_a_group_dies_while_a_fragment_is_summed_and_another_life_returns(
    desk: Desk, ranks: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round goes on without it. Its next life begins from anything, and gets θ of all fragments."""
    F, rounds = 3, 7
    plain = Plain(*start_of(desk, F), 3, NESTEROV)
    expected: dict[tuple[int, int], Tensor] = {}
    for t in range(1, rounds + 1):
        here = [g for g in range(3) if g != DIES or t in (1, 5, 6, 7)]
        for g in range(3):
            plain.move(g, CHANGES[g][t - 1])
        if t == 5:
            plain.w[DIES] += 1000.0
        plain.synchronize(due(t, F, F), here, [g for g in here if g != DIES or t != 5])
        expected |= {(t, g): plain.w[g].clone() for g in here}
    how: dict[str, Any] = {"sync_every": F, "num_fragments": F, "outer": NESTEROV}
    summed, dies = Rings.mean, threading.Event()

    def dying(rings: Rings, *arguments: Any) -> None:
        if rings._replica_group == DIES and dies.is_set():
            raise Died
        summed(rings, *arguments)

    def life(group: Communicator, alive: ElasticAverage, first: int, stray: float) -> list[Any]:
        moved = Moved(group, alive, torch.float64, **how)
        found: list[Any] = []
        for t in range(first, rounds + 1):
            moved.by(CHANGES[DIES][t - 1] + stray * (t == first))
            moved.optimizer.resume_from(alive.after.place.t, [{} for _ in moved.optimizer.param_groups], None)
            found.append(((alive.after.place.t, DIES), whole(moved.optimizer)))
            if t == 1:
                group.barrier()
                dies.set()
        return found

    def dies_and_returns(group: Communicator, alive: ElasticAverage) -> dict[tuple[int, int], Tensor]:
        found: list[Any] = []
        with pytest.raises(Died):
            found += life(group, alive, 1, 0.0)
        alive.close()
        group.barrier()
        dies.clear()
        wait_for(lambda: at.register.rounds == 3)
        again = ElasticAverage(
            DIES, group, at.address, TOKEN, "127.0.0.1", heartbeat_timeout=HEARTBEAT_TIMEOUT
        )
        try:
            return dict([*found, *life(group, again, 5, 1000.0)])
        finally:
            again.close()

    def body(g: int, group: Communicator, alive: ElasticAverage) -> dict[tuple[int, int], Tensor]:
        if g == DIES:
            return dies_and_returns(group, alive)
        moved = Moved(group, alive, torch.float64, **how)
        found: dict[tuple[int, int], Tensor] = {}
        for t in range(1, rounds + 1):
            if t == 4:
                wait_for(lambda: DIES in at.membership.expected)
            moved.by(CHANGES[g][t - 1])
            found[t, g] = whole(moved.optimizer)
        return found

    monkeypatch.setattr(Rings, "mean", dying)
    with desk.coordinator(3) as at:
        courses = [one for of_group in replica_groups(at, ranks, body) for one in of_group]
    for course in courses:
        for place, model in course.items():
            torch.testing.assert_close(model, expected[place], msg=f"{place}")
    commits = [event["counted"] for event in desk.events() if event["event"] == "commit"]
    assert commits[-7:] == [[0, 1, 2], *[[0, 2]] * 4, [0, 1, 2], [0, 1, 2]]


def test_the_first_synchronization_has_all_fragments(desk: Desk) -> None:
    """The groups begin with other models: all of them take that of group 0, before they have trained."""

    def body(g: int, group: Communicator, alive: ElasticAverage) -> tuple[bool, Tensor, bool]:
        moved = Moved(group, alive, torch.float64, sync_every=3, num_fragments=3, outer=NESTEROV)
        with torch.no_grad():
            for x in moved.net.parameters():
                x.add_(g)
        moved.optimizer.average_models()
        all_at_start, model = alive.covers_all, whole(moved.optimizer)
        moved.by(1.0)
        return all_at_start, model, alive.covers_all

    with desk.coordinator(2) as at:
        found = [one for of_group in replica_groups(at, (1, 2), body) for one in of_group]
    assert [(at_start, later) for at_start, _, later in found] == [(True, False)] * 3
    assert all(torch.equal(model, found[0][1]) for _, model, _ in found)


def test_the_distance_has_the_fragments_that_were_synchronized(desk: Desk) -> None:
    """The groups move apart by 1 in each step, so that group 0 is half of that off the mean."""
    F, sizes = 3, [int(mask.sum()) for mask in start_of(desk, 3)[1]]

    def body(g: int, group: Communicator, alive: ElasticAverage) -> list[float]:
        moved = Moved(group, alive, torch.float64, sync_every=F, num_fragments=F, outer=NESTEROV)
        found = []
        for _ in range(4):
            moved.by(float(g))
            found.append(moved.optimizer.metrics["distance"])
        return found

    squared, expected = [0.0] * F, list[float]()
    for t in range(1, 5):
        fragment = due(t, F, F)
        assert fragment is not None
        squared[fragment] = sizes[fragment] * (min(t, F) / 2) ** 2
        expected.append(sum(squared) ** 0.5)
    with desk.coordinator(2) as at:
        for of_group in replica_groups(at, (1, 2), body):
            assert of_group[0] == pytest.approx(expected)


@pytest.mark.parametrize("F", [1, 4])
def test_a_synchronization_sends_one_fragment(desk: Desk, F: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four equal layers, each is a fragment. The first synchronization also sends θ and the momentum."""
    sent, send = {0: 0}, ring._send
    lock = threading.Lock()

    def counted(right: Any, message: memoryview) -> int:
        n = send(right, message)
        with lock:
            sent[max(sent)] += n
        return n

    size, rounds = 50, 9
    nbytes = size * size * 4

    def body(g: int, group: Communicator, alive: ElasticAverage) -> None:
        moved = Moved(group, alive, torch.float32, sync_every=4, outer=NESTEROV, num_fragments=F)
        for t in range(1, 4 * rounds + 1):
            before = alive.rounds
            moved.by(1.0)
            if alive.rounds > before and g == 0:
                with lock:
                    sent[t] = 0
            if alive.rounds > before:
                wait_for(lambda t=t: t in sent)

    monkeypatch.setattr("elastic.test_outer_ensemble.model", lambda **_: layers(size))
    monkeypatch.setattr(ring, "_send", counted)
    with desk.coordinator(2) as at:
        replica_groups(at, (1, 1), body)
    of_rounds = list(sent.values())[:-1]
    assert len(of_rounds) == (rounds if F == 1 else 4 * rounds)
    few = 200  # bytes of norms
    of_a_round = 2 * 4 * nbytes // F  # each of two groups sends and passes on half of it
    assert all(of_a_round <= n <= of_a_round + few for n in of_rounds[1:])
    assert of_a_round + 4 * 4 * nbytes <= of_rounds[0] <= of_a_round + 4 * 4 * nbytes + 2 * few


@pytest.mark.parametrize("merge", [None, RadialDirectional()])
@pytest.mark.parametrize("F", [1, 4])
@pytest.mark.parametrize(("tokens_per_step", "numbers"), [(None, 1), (2.0, 2)])
def test_one_operation_sends_the_norms_of_all_fragments(
    F: int, merge: RadialDirectional | None, tokens_per_step: float | None, numbers: int
) -> None:
    """A group that has weights sends one more number for each fragment."""
    P, K, n = 5, 2, 4000
    how: dict[str, Any] = {"merge": merge, "num_fragments": F, "tokens_per_step": tokens_per_step}
    averager = hpcsgd.ensemble_sync(4, outer=NESTEROV, **how).averager
    operations = list(comm_ops(averager, ModelLayout(P, K, (BucketLayout(n, n, 4),), layers=(n,))))
    alone = [x for x in operations if x.over == "replica_groups" and x.times == 1.0][: 1 if F == 1 else None]
    assert [x.nbytes for x in alone] == [8 * P * (numbers * F + 2)]
    models = [x for x in operations if x.over == "replica_groups" and x.nbytes == n / F * 4 / K]
    assert sum(x.times for x in models) == 1.0


def layers(size: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(4)))


def test_the_method_says_how_often_groups_synchronize() -> None:
    method = hpcsgd.ensemble_sync(8, outer=NESTEROV, num_fragments=4, quorum=3, grace_s=1.5)
    assert method.waits == Living(2, Quorum(3, 1.5))
    assert hpcsgd.ensemble_sync(8, outer=NESTEROV, num_fragments=1).waits == Living(8)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"num_fragments": 0}, "num_fragments = 0: expected 1 to 8, the steps between synchronizations"),
        ({"num_fragments": 9}, "num_fragments = 9: expected 1 to 8, the steps between synchronizations"),
        ({"num_fragments": 2, "outer": None}, "num_fragments: it needs an outer optimizer: pass outer as"),
        (
            {"num_fragments": 2, "guard": PseudoGradientPenalty()},
            "guard: it cannot be combined with num_fragments: leave one of the two out",
        ),
        ({"num_fragments": 1.5}, "ensemble_sync: num_fragments = 1.5: expected a whole"),
    ],
)
def test_what_is_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=f"^{why}") as refused:
        hpcsgd.ensemble_sync(8, **{"outer": NESTEROV, **given})
    assert "\n" not in str(refused.value)


def test_more_fragments_than_tensors_are_refused(desk: Desk) -> None:
    def body(g: int, group: Communicator, alive: ElasticAverage) -> str:
        moved = Moved(group, alive, torch.float64, sync_every=8, num_fragments=7, outer=NESTEROV)
        with pytest.raises(UserError) as refused:
            moved.by(1.0)
        return str(refused.value)

    with desk.coordinator(1) as at:
        ((why,),) = replica_groups(at, (1,), body)
    assert why == "num_fragments = 7: expected at most 6, the model's trainable tensors"


@pytest.mark.parametrize("make", [NESTEROV, ADAM])
@pytest.mark.parametrize(("F", "G"), [(3, 3), (3, 2), (3, 1), (1, 3)])
def test_the_state_goes_on_with_as_many_fragments_or_others(
    desk: Desk, make: MakeOptimizer, F: int, G: int
) -> None:
    """θ is the same after loading; with as many fragments, the next steps are, too."""

    def made(group: Communicator, alive: ElasticAverage, n: int) -> Moved:
        return Moved(group, alive, torch.float64, sync_every=3, num_fragments=n, outer=make)

    def body(g: int, group: Communicator, alive: ElasticAverage) -> tuple[Any, ...]:
        moved = made(group, alive, F)
        for change in CHANGES[g][:5]:
            moved.by(change)
        moved.optimizer.average_models()
        again = made(group, alive, G)
        with torch.no_grad():
            for mine, theirs in zip(again.net.parameters(), moved.net.parameters(), strict=True):
                mine.copy_(theirs)
        again.optimizer.resume_from(moved.optimizer.t, [{} for _ in again.optimizer.param_groups], None)
        again.optimizer.method.load_state_dict(moved.optimizer.method.state_dict())
        before = whole(again.optimizer)
        again.optimizer.average_models()
        kept = whole(again.optimizer)
        on = [by(change) for change in CHANGES[g][5:] for by in (moved.by, again.by)]
        return before, kept, on

    with desk.coordinator(2) as at:
        for of_group in replica_groups(at, (1, 2), body):
            for before, kept, on in of_group:
                torch.testing.assert_close(kept, before)
                if F == G:
                    assert all(torch.equal(x, y) for x, y in zip(on[::2], on[1::2], strict=True))
