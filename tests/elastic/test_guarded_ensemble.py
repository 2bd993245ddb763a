"""Groups that may die, one of which diverges: which group is left out, and what returning groups get."""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, optim

import hpcsgd
from elastic.conftest import HEARTBEAT_TIMEOUT, TOKEN, Desk
from elastic.test_elastic_average import replica_groups
from hpcsgd.comm import Communicator
from hpcsgd.core.topology import form
from hpcsgd.elastic.coordinator import Coordinator
from hpcsgd.elastic.elastic_average import ElasticAverage
from hpcsgd.errors import UserError
from hpcsgd.parts.averagers import GuardedElasticMean, PseudoGradientPenalty
from references import model, vector

PLAIN = PseudoGradientPenalty(temperature=math.inf)
BAD = 1
"""The group that diverges."""
ALL = 3


class Moved:
    """A group of a model with a buffer. It moves by given changes, and then synchronizes."""

    def __init__(self, group: Communicator, alive: ElasticAverage, guard: PseudoGradientPenalty) -> None:
        self.net = model(dtype=torch.float64)
        self.net.register_buffer("seen", torch.zeros(2, dtype=torch.float64))
        self.optimizer = hpcsgd.DistributedOptimizer(
            optim.SGD(self.net.parameters(), lr=1.0),
            self.net,
            dataclasses.replace(form(group), replica_groups=alive),
            hpcsgd.ensemble_sync(1, guard=guard),
        )
        self.start = vector(self.net)

    def by(self, change: float) -> tuple[float, float, float]:
        """Change the model, set the buffer to `change`, and synchronize.

        Return how far the model is from its first value, the buffer, and how many groups were left out.
        """
        for p in self.net.parameters():
            p.grad = torch.full_like(p, -change)
        self.seen.fill_(change)
        self.optimizer.step()
        found = vector(self.net) - self.start
        spread = (found.max() - found.min()).item()
        assert not spread > 1e-9  # NaN if the model is infinite
        return found.mean().item(), self.seen[0].item(), self.optimizer.metrics["groups_left_out"]

    @property
    def seen(self) -> Tensor:
        return self.net.get_buffer("seen")


def moves(
    at: Coordinator, ranks: Sequence[int], changes: Sequence[Sequence[float]], guard: PseudoGradientPenalty
) -> list[list[Any]]:
    """Return the results of every rank whose group makes the changes in its row of `changes`."""

    def body(g: int, group: Communicator, alive: ElasticAverage) -> list[tuple[float, float, float]]:
        moved = Moved(group, alive, guard)
        return [moved.by(change) for change in changes[g]]

    return [found for of_group in replica_groups(at, ranks, body) for found in of_group]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("ranks", [(1, 1, 1), (2, 1, 3)])
def test_who_is_not_finite_is_left_out(desk: Desk, ranks: tuple[int, ...], value: float) -> None:
    """Its model and its buffers are left out; it continues from the mean of the others."""
    with desk.coordinator(ALL) as at:
        for found in moves(at, ranks, [[1.0, 1.0], [value, 1.0], [2.0, 1.0]], PLAIN):
            assert found == [pytest.approx((1.5, 1.5, 1)), pytest.approx((2.5, 1.0, 0))]


def test_an_outlier_is_left_out_and_comes_back(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    usual = [1.0 + 0.01 * t for t in range(5)]
    guard = PseudoGradientPenalty(temperature=math.inf, warm_up=5)
    changes = [[*usual, 1.0, 1.0, 1.0] for _ in range(ALL)]
    changes[BAD] = [*usual, 40.0, 40.0, 0.7]
    with desk.coordinator(ALL) as at:
        for found in moves(at, (1, 1, 1), changes, guard):
            steps = [after[0] - before[0] for before, after in itertools.pairwise(found[4:])]
            assert steps == pytest.approx([1.0, 1.0, 0.9])
            assert [out for _, _, out in found] == [0] * 5 + [1, 1, 0]
    told = [each.getMessage() for each in caplog.records if each.name.endswith("guarded_elastic_mean")]
    assert [line.split(":")[:2] for line in told] == [
        ["step 6", f" group {BAD} is left out"],
        ["step 8", f" group {BAD} is averaged again"],
    ]


def test_small_changes_have_more_weight(desk: Desk) -> None:
    weights = PseudoGradientPenalty().weights([1.0, 2.0, 3.0])
    expected = sum(a * x for a, x in zip(weights, (1.0, 2.0, 3.0), strict=True))
    with desk.coordinator(ALL) as at:
        for found in moves(at, (1, 2, 1), [[1.0], [2.0], [3.0]], PseudoGradientPenalty()):
            assert found == [pytest.approx((expected, expected, 0))]


@pytest.mark.parametrize("value", [math.nan, 50.0])
def test_if_all_are_outliers_nobody_moves(desk: Desk, value: float) -> None:
    guard = PseudoGradientPenalty(warm_up=3)
    with desk.coordinator(ALL) as at:
        for found in moves(at, (1, 2, 1), [[1.0, 1.1, 1.2, value, 1.1]] * ALL, guard):
            (before, buffer, _), after, again = found[2:]
            assert after == pytest.approx((before, buffer, ALL))
            assert again == pytest.approx((before + 1.1, 1.1, 0))


@pytest.mark.parametrize("change", [50.0, math.inf])
def test_who_is_alone_is_not_left_out(desk: Desk, change: float) -> None:
    guard = PseudoGradientPenalty(warm_up=2)
    with desk.coordinator(1) as at:
        [found] = moves(at, (1,), [[1.0, 1.1, 1.2, change]], guard)
    assert found[-1] == pytest.approx((3.3 + change, change, 0))


def test_who_returns_adds_nothing_and_has_a_new_history(desk: Desk) -> None:
    """It takes the mean of the others, although it begins with another model. Then its changes count."""
    died, alone = threading.Event(), threading.Event()

    def returning(group: Communicator, alive: ElasticAverage) -> list[tuple[float, float, float]]:
        Moved(group, alive, PLAIN).by(1.0)
        alive.close()
        died.set()
        assert alone.wait(60)
        again = ElasticAverage(
            BAD, group, at.address, TOKEN, "127.0.0.1", heartbeat_timeout=HEARTBEAT_TIMEOUT
        )
        try:
            moved = Moved(group, again, PLAIN)
            found = [moved.by(1000.0), moved.by(4.0)]
            assert moved.optimizer.method.state_dict()["averager"].replicated["count"] == 1
            return found
        finally:
            again.close()

    def body(g: int, group: Communicator, alive: ElasticAverage) -> list[tuple[float, float, float]]:
        if g == BAD:
            return returning(group, alive)
        moved = Moved(group, alive, PLAIN)
        moved.by(1.0)
        assert died.wait(60)
        moved.by(1.0)
        alone.set()
        while True:
            before = moved.by(1.0)
            if BAD in alive.members:
                return [before, moved.by(1.0)]

    with desk.coordinator(2) as at:
        (theirs,), (mine,) = replica_groups(at, (1, 1), body)
    assert mine == [pytest.approx(each) for each in theirs]
    assert [out for _, _, out in mine] == [0, 0]
    assert mine[0][1] == pytest.approx(1.0)
    assert mine[1][0] - mine[0][0] == pytest.approx(2.5)


def test_a_limit_is_refused() -> None:
    with pytest.raises(UserError) as refused:
        hpcsgd.ensemble_sync(1, guard=PseudoGradientPenalty(max_norm=2.0))
    assert str(refused.value).startswith("guard: max_norm = 2: expected None, ")


def test_a_history_is_saved() -> None:
    averager = hpcsgd.ensemble_sync(1, guard=PLAIN).averager
    assert isinstance(averager, GuardedElasticMean)
    state = {"mean": 2.0, "variance": 0.5, "count": 7}
    averager.load_state_dict(dataclasses.replace(averager.state_dict(), replicated=state))
    assert averager.state_dict().replicated == state
