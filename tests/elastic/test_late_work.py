"""Late groups, whose work counts when they return: exactly their own change, once, and only in time."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from elastic.conftest import HEARTBEAT_TIMEOUT, TOKEN, Desk, wait_for
from elastic.test_elastic_average import replica_groups
from elastic.test_outer_ensemble import ADAM, Moved, reference
from hpcsgd.comm import Communicator
from hpcsgd.core.waits import Living, Quorum
from hpcsgd.elastic.attempt import Outcome, outcome
from hpcsgd.elastic.client import Client
from hpcsgd.elastic.contribution import Facts
from hpcsgd.elastic.coordinator import Coordinator
from hpcsgd.elastic.elastic_average import ElasticAverage
from hpcsgd.elastic.event_log import Event
from hpcsgd.elastic.register import Phase, Register
from hpcsgd.errors import UserError
from hpcsgd.methods import ensemble_sync
from hpcsgd.parts.averagers import NESTEROV, MakeOptimizer, PseudoGradientPenalty, RadialDirectional
from hpcsgd.parts.averagers.elastic_mean import rebased

LATE = 2
"""The group that is late. Groups 0 and 1 are a quorum."""
GRACE = 600.0
"""Seconds; longer than any machine delays a thread. The tests let this time pass."""
PLAIN = PseudoGradientPenalty(temperature=math.inf)


def no_longer_waited_for(at: Coordinator, group: Communicator) -> None:
    """Let the grace time of the next round pass as soon as the quorum has arrived, and wait for its end."""
    if group.rank == 0:
        rounds = at.register.rounds
        wait_for(lambda: at._arrivals._enough_since is not None)
        assert at._arrivals._enough_since is not None
        at._arrivals._enough_since -= GRACE + 1
        wait_for(lambda: at.register.rounds > rounds)
    group.barrier()


class Story:
    """What groups do: in round r+1 group g moves by `changes[g][r]`; None: the late group misses that round.

    The late group makes each of its changes when the first round that it misses is over. It asks to return
    before the last one that it misses.
    """

    def __init__(self, at: Coordinator, *changes: Sequence[float | None], **how: Any) -> None:
        self._at, self._changes = at, changes
        self._late = next(g for g, course in enumerate(changes) if None in course)
        self._how = {"outer": NESTEROV, "quorum": 2, "grace_s": GRACE, "late_rounds": 2, **how}
        self.distances: dict[int, float] = {}
        """For each group, the metric after its last round."""

    def train(self, g: int, group: Communicator, alive: ElasticAverage) -> list[tuple[int, Tensor]]:
        """Return the number of each round, and the model with the buffer after it."""
        moved = Moved(group, alive, torch.float64, **self._how)
        moved.net.register_buffer("seen", torch.zeros(2, dtype=torch.float64))
        found: list[tuple[int, Tensor]] = []
        for r, change in enumerate(self._changes[g]):
            if change is None:
                if self._changes[g][r - 1] is not None:
                    no_longer_waited_for(self._at, group)
                continue
            self._wait(g, r)
            moved.net.get_buffer("seen").fill_(change)
            model = torch.cat([moved.by(change), moved.net.get_buffer("seen")])
            found.append((alive.rounds, model))
            self.distances[g] = moved.optimizer.metrics["distance"]
            moved.optimizer.resume_from(alive.after.place.t, [{} for _ in moved.optimizer.param_groups], None)
        return found

    def _wait(self, g: int, r: int) -> None:
        """Let the late group ask to return between the last two rounds that it misses."""
        missed = [change is None for change in self._changes[self._late]]
        if g == self._late and r and missed[r - 1]:
            wait_for(lambda: self._at.register.rounds == r - 1)
        if g != self._late and missed[r - 1 : r + 2] == [True, True, False]:
            wait_for(lambda: self._late in self._at.membership.expected)


def trained(
    desk: Desk, ranks: Sequence[int], *changes: Sequence[float | None], late_rounds: int = 2, **how: Any
) -> list[list[list[tuple[int, Tensor]]]]:
    """Return, by group and rank, the rounds in which the group took part and the models after them."""
    with desk.coordinator(len(ranks), quorum=2, grace=GRACE, late_rounds=late_rounds) as at:
        story = Story(at, *changes, late_rounds=late_rounds, **how)
        return replica_groups(at, ranks, story.train)


def assert_steps(
    found: list[list[list[tuple[int, Tensor]]]], means: Sequence[float], make: MakeOptimizer = NESTEROV
) -> None:
    """Check that all groups have the models of `reference`, the same bits in each round."""
    courses = [dict(course) for of_group in found for course in of_group]
    of_all = max(courses, key=len)
    for course in courses:
        assert all(torch.equal(model, of_all[rounds]) for rounds, model in course.items())
    assert list(of_all) == list(range(1, len(means) + 1))
    for model, expected in zip(of_all.values(), reference(means, make), strict=True):
        torch.testing.assert_close(model[:-2], expected)


def events(desk: Desk, *names: str) -> list[Event]:
    """Return the events of these names, without the ends of the groups when the test is over."""
    found = [event for event in desk.events() if event["event"] in names]
    return [event for event in found if event.get("kind", "late") == "late"]


@pytest.mark.parametrize("make", [NESTEROV, ADAM])
@pytest.mark.parametrize(("ranks", "late"), [((1, 1, 1), 2), ((2, 1, 3), 2), ((1, 3, 2), 0)])
def test_the_work_counts_in_the_round_of_the_return(
    desk: Desk, ranks: tuple[int, ...], late: int, make: MakeOptimizer, caplog: pytest.LogCaptureFixture
) -> None:
    """The late group moves by 6 from the first model, and the fourth mean has just that of it."""
    caplog.set_level(logging.WARNING)
    changes: list[Sequence[float | None]] = [[1.0, 2.0, -1.0, 0.5, 1.5]] * 3
    changes[late] = [4.0, None, None, 6.0, 3.0]
    found = trained(desk, ranks, *changes, outer=make)
    assert_steps(found, [2.0, 2.0, -1.0, 7 / 3, 2.0], make)
    assert events(desk, "lost") == []
    why = f"it did not arrive within {GRACE:g} s after the quorum of 2"
    assert [(event["replica_group"], event["why"]) for event in events(desk, "late")] == [(late, why)]
    others = [g for g in range(3) if g != late]
    assert [event["counted"] for event in events(desk, "commit")] == [
        [0, 1, 2], others, others, [0, 1, 2], [0, 1, 2]
    ]  # fmt: skip
    assert caplog.messages == [
        f"the other groups go on without this group: {why}; what it learned since synchronization 1 counts "
        "later if it misses at most 2 synchronizations",
        "synchronization 4 counts what this group learned since synchronization 1",
    ]


@pytest.mark.parametrize("ranks", [(1, 1, 1), (2, 1, 3)])
def test_it_counts_so_in_radial_directional_averages(desk: Desk, ranks: tuple[int, ...]) -> None:
    """The changes of a round have one direction here, so that their average is the plain mean."""
    changes: list[Sequence[float | None]] = [[1.0, 2.0, -1.0, 0.5, 1.5]] * 3
    changes[LATE] = [4.0, None, None, 6.0, 3.0]
    found = trained(desk, ranks, *changes, merge=RadialDirectional())
    assert_steps(found, [2.0, 2.0, -1.0, 7 / 3, 2.0])


def test_too_old_work_is_lost(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    others = [1.0, 2.0, -1.0, 1.0, 0.5, 1.5]
    late = [4.0, None, None, None, 1000.0, 3.0]
    found = trained(desk, (1, 2, 1), others, others, late)
    assert_steps(found, [2.0, 2.0, -1.0, 1.0, 0.5, 2.0])
    assert [event["event"] for event in events(desk, "late", "lost", "commit")] == [
        *["commit", "late", "commit", "commit", "commit", "lost", "commit", "commit"]
    ]
    assert [(event["replica_group"], event["kind"]) for event in events(desk, "lost")] == [(LATE, "late")]
    assert caplog.messages[-1] == (
        "what this group learned since synchronization 1 is lost: this group missed 3 synchronizations"
    )


def test_one_missed_round_is_fewer_than_two(desk: Desk) -> None:
    """With `late_rounds` = 1 the same story ends otherwise, and with 3 the work that was too old counts."""
    others = [1.0, 2.0, -1.0, 0.5]
    found = trained(desk, (1, 1, 1), others, others, [4.0, None, None, 1000.0], late_rounds=1)
    assert_steps(found, [2.0, 2.0, -1.0, 0.5])
    others = [1.0, 2.0, -1.0, 1.0, 0.5]
    found = trained(desk, (1, 1, 1), others, others, [4.0, None, None, None, 5.0], late_rounds=3)
    assert_steps(found, [2.0, 2.0, -1.0, 1.0, 2.0])


def test_who_is_late_twice_brings_each_change_once(desk: Desk) -> None:
    others = [1.0, 2.0, -1.0, 0.5, 1.5, 2.5, 3.5, 1.0]
    late = [4.0, None, None, 6.0, None, None, 8.0, -2.0]
    found = trained(desk, (1, 1, 2), others, others, late)
    assert_steps(found, [2.0, 2.0, -1.0, 7 / 3, 1.5, 2.5, 5.0, 0.0])
    assert [event["event"] for event in events(desk, "late", "lost")] == ["late", "late"]


def test_buffers_count_as_they_are(desk: Desk) -> None:
    others = [1.0, 2.0, -1.0, 0.5]
    found = trained(desk, (1, 2, 1), others, others, [4.0, None, None, 6.0])
    seen = [model[-2:] for _, model in found[0][0]]
    for buffer, expected in zip(seen, [2.0, 2.0, -1.0, 7 / 3], strict=True):
        torch.testing.assert_close(buffer, torch.full((2,), expected, dtype=torch.float64))


@pytest.mark.parametrize("make", [NESTEROV, ADAM])
def test_a_guard_weighs_the_own_change(desk: Desk, make: MakeOptimizer) -> None:
    """The norm of the late group's change is that from its own base, not from the newest model."""
    guard = PseudoGradientPenalty()

    def mean(changes: Sequence[float]) -> float:
        weights = guard.weights([abs(x) for x in changes])
        return sum(a * x for a, x in zip(weights, changes, strict=True))

    found = trained(
        desk, (1, 2, 1), [1.0, 2.0, 1.0, 0.5], [2.0, 1.0, 3.0, 1.0], [4.0, None, None, 6.0], guard=guard,
        outer=make,
    )  # fmt: skip
    assert_steps(found, [mean(x) for x in ((1.0, 2.0, 4.0), (2.0, 1.0), (1.0, 3.0), (0.5, 1.0, 6.0))], make)


def test_a_guard_leaves_out_what_is_not_finite(desk: Desk) -> None:
    """If it leaves out all groups, they keep the newest model, not that of the late group.

    The late group reports how far that is from the model from which it began.
    """
    others = [1.0, 2.0, -1.0, 0.5, 1.5]
    found = trained(desk, (1, 2, 1), others, others, [4.0, None, None, math.nan, 3.0], guard=PLAIN)
    assert_steps(found, [2.0, 2.0, -1.0, 0.5, 2.0])
    others = [1.0, 2.0, -1.0, math.nan]
    with desk.coordinator(3, quorum=2, grace=GRACE, late_rounds=2) as at:
        story = Story(at, others, others, [4.0, None, None, math.nan], guard=PLAIN)
        found = replica_groups(at, (1, 2, 1), story.train)
    assert (story.distances[0], story.distances[1]) == (pytest.approx(0), pytest.approx(0))
    first, _, expected = reference([2.0, 2.0, -1.0], NESTEROV)
    assert story.distances[LATE] == pytest.approx((expected - first).norm().item())
    for _, model in (found[0][0][-1], found[LATE][0][-1]):
        torch.testing.assert_close(model[:-2], expected)


def test_who_has_not_moved_adds_nothing(desk: Desk) -> None:
    others = [1.0, 2.0, -1.0, 0.5]
    found = trained(desk, (1, 1, 1), others, others, [4.0, None, None, 0.0])
    assert_steps(found, [2.0, 2.0, -1.0, 0.5])
    assert [event["counted"] for event in events(desk, "commit")][-1] == [0, 1]
    names = [event["event"] for event in events(desk, "late", "lost", "generation", "commit")]
    assert names[-3:] == ["lost", "generation", "commit"]  # it is lost before the group is a member again


def test_new_processes_bring_nothing(desk: Desk) -> None:
    """Their first model is no change of the groups' model."""

    def body(g: int, group: Communicator, alive: ElasticAverage) -> list[Tensor]:
        how = {"outer": NESTEROV, "quorum": 2, "grace_s": GRACE, "late_rounds": 9}
        moved = Moved(group, alive, torch.float64, **how)
        found = [moved.by(1.0)]
        if g != LATE:
            wait_for(lambda: LATE not in at.membership.expected)
            found.append(moved.by(2.0))
            wait_for(lambda: LATE in at.membership.expected)
            return [*found, moved.by(3.0), moved.by(4.0)]
        alive.close()
        wait_for(lambda: at.register.rounds == 2)
        again = ElasticAverage(
            LATE, group, at.address, TOKEN, "127.0.0.1", heartbeat_timeout=HEARTBEAT_TIMEOUT
        )
        try:
            return [Moved(group, again, torch.float64, **how).by(1000.0)]
        finally:
            again.close()

    with desk.coordinator(3, quorum=2, grace=GRACE, late_rounds=9) as at:
        found = replica_groups(at, (1, 1, 1), body)
    for model, expected in zip(found[0][0], reference([1.0, 2.0, 3.0, 4.0], NESTEROV), strict=True):
        torch.testing.assert_close(model, expected)
    assert torch.equal(found[LATE][0][-1], found[0][0][-1])


def test_work_that_may_have_counted_does_not_count_again(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The late group has voted, and is lost before it hears that the round is committed."""
    vote = Client.vote

    def unheard(client: Client, generation: int, rounds: int, *ballot: Any) -> Register:
        after = vote(client, generation, rounds, *ballot)
        if client._hello["replica_group"] == LATE and rounds == 1 and generation == 1:
            wait_for(lambda: silenced(at) or client.ended)
            return client.register  # raises Evicted
        return after

    def silenced(at: Coordinator) -> bool:
        for client in [client for client in at._clients if client.replica_group == LATE]:
            if client.life.endswith(".1"):
                client.heard -= HEARTBEAT_TIMEOUT
        return False

    def body(g: int, group: Communicator, alive: ElasticAverage) -> list[Tensor]:
        moved = Moved(group, alive, torch.float64, outer=NESTEROV, quorum=2, grace_s=GRACE, late_rounds=2)
        if g == LATE:
            return [moved.by(1.0), moved.by(6.0)]
        found = [moved.by(1.0), moved.by(3.0)]
        wait_for(lambda: LATE in at.membership._came())
        return [*found, moved.by(1.0)]

    monkeypatch.setattr(Client, "vote", unheard)
    with desk.coordinator(3, quorum=2, grace=GRACE, late_rounds=2) as at:
        found = replica_groups(at, (1, 1, 1), body)
    for model, expected in zip(found[0][0], reference([1.0, 4.0, 1.0], NESTEROV), strict=True):
        torch.testing.assert_close(model, expected)
    assert torch.equal(found[LATE][0][-1], found[0][0][-1])
    assert caplog.messages[-1] == (
        "the other groups may have counted what this group learned since synchronization 1, so it does not "
        "count again"
    )


class Rows:
    """What a rank of an FSDP model adds: its own rows, which have moved from `base` by `change`."""

    norms: Sequence[float] = (1.0,)
    weights: Sequence[float] = ()
    part: int | None = None
    late_rounds = 2

    def __init__(self, base: float, change: float, rank: int) -> None:
        self.tensors = [torch.full((3 + rank,), base + change)]
        self.shared: Sequence[Tensor] = [torch.full((3 + rank,), base)]
        self._base = base

    def __call__(self, facts: Facts, newest: Sequence[Tensor] = ()) -> Sequence[Tensor]:
        base = [torch.full_like(x, self._base) for x in self.tensors]
        return rebased(self.tensors, base, newest) if newest else self.tensors


def test_each_rank_brings_its_own_rows(desk: Desk) -> None:
    def body(g: int, group: Communicator, alive: ElasticAverage) -> list[Tensor]:
        def mean(base: float, change: float) -> Tensor:
            rows = Rows(base, change, group.rank)
            w = [x.clone() for x in rows.tensors]
            alive.mean(w, alike=False, contribution=rows)
            return w[0]

        mean(0.0, 1.0)
        if g == LATE:
            no_longer_waited_for(at, group)
            return [mean(1.0, 10.0 * (1 + group.rank))]
        mean(1.0, 1.0)
        wait_for(lambda: LATE in at.membership.expected)
        mean(2.0, 1.0)
        return [mean(50.0, 4.0)]

    with desk.coordinator(3, quorum=2, grace=GRACE, late_rounds=2) as at:
        for of_group in replica_groups(at, (2, 2, 2), body):
            for rank, (found,) in enumerate(of_group):
                expected = 50 + (4 + 4 + 10 * (1 + rank)) / 3
                torch.testing.assert_close(found, torch.full((3 + rank,), expected))


def test_the_change_is_exact_in_sixteen_bits() -> None:
    base, w = torch.full((2,), 300.0, dtype=torch.bfloat16), torch.full((2,), 302.0, dtype=torch.bfloat16)
    (found,) = rebased([w], [base], [torch.tensor([257.0, 1.001])])
    assert found.tolist() == [258.0, 3.0], "newest is rounded like the models that began from it"
    assert found.dtype == torch.float32


@pytest.mark.parametrize(
    ("after", "voted", "expected"),
    [
        (Register(4, 7, 5, Phase.RUN), True, "committed"),
        (Register(4, 7, 5, Phase.OPEN), True, "committed"),
        (Register(4, 6, 5, Phase.OPEN), True, "aborted"),
        (Register(5, 8, 6, Phase.RUN), True, "aborted"),
        (Register(5, 7, 7, Phase.RUN), True, "unknown"),
        (Register(6, 7, 7, Phase.RUN), True, "unknown"),
        (Register(5, 7, 7, Phase.RUN), False, "aborted"),
    ],
)
def test_what_a_rank_knows_after_its_connection_was_broken(
    after: Register, voted: bool, expected: str
) -> None:
    """Its round is the one after 6 rounds in generation 4."""
    during = Register(4, 6, 5, Phase.RUN)
    known = {"committed": Outcome((during, after)), "aborted": Outcome(), "unknown": Outcome(is_unknown=True)}
    assert outcome(4, 6, during, after, voted=voted) == known[expected]


def test_the_method_says_how_late_work_may_be() -> None:
    for guard in (None, PseudoGradientPenalty()):
        method = ensemble_sync(8, guard=guard, outer=NESTEROV, quorum=3, grace_s=1.5, late_rounds=4)
        assert method.averager.traits.waits == Living(quorum=Quorum(3, 1.5, 4))


QUORUM: dict[str, Any] = {"quorum": 2, "grace_s": 2.0}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"late_rounds": 2, "outer": NESTEROV}, "late_rounds: it needs quorum and grace_s as well"),
        ({"late_rounds": 2, **QUORUM}, "late_rounds: it needs outer as well; the outer optimizer SGD with"),
        ({"late_rounds": -1, "outer": NESTEROV, **QUORUM}, "late_rounds = -1: expected at least 0"),
        (
            {"late_rounds": 1.5, "outer": NESTEROV, **QUORUM},
            "ensemble_sync: late_rounds = 1.5: expected a whole",
        ),
    ],
)
def test_what_is_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=f"^{why}") as refused:
        ensemble_sync(8, **given)
    assert "\n" not in str(refused.value)
