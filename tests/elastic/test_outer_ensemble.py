"""An outer optimizer on the mean of groups that may die: its steps, and its state in returning groups."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import hpcsgd
from elastic.conftest import HEARTBEAT_TIMEOUT, TOKEN, Desk
from elastic.test_elastic_average import replica_groups
from hpcsgd.comm import Communicator
from hpcsgd.core.topology import form
from hpcsgd.elastic.elastic_average import ElasticAverage
from hpcsgd.errors import UserError
from hpcsgd.parts import outer_schedules
from hpcsgd.parts.averagers import (
    NESTEROV,
    MakeOptimizer,
    OuterElasticMean,
    PseudoGradientPenalty,
    RadialDirectional,
)
from references import model, vector

ADAM: MakeOptimizer = lambda ws: optim.Adam(ws, lr=0.1, betas=(0.8, 0.9))  # noqa: E731
ALL, BAD = 3, 1
MERGE = RadialDirectional()


class Moved:
    """A group that moves by given changes, and then synchronizes; by default after each change."""

    def __init__(
        self,
        group: Communicator,
        alive: ElasticAverage,
        dtype: torch.dtype,
        *,
        sync_every: int = 1,
        method: hpcsgd.Method | None = None,
        **how: Any,
    ) -> None:
        self.net = model(dtype=dtype)
        self.optimizer = hpcsgd.DistributedOptimizer(
            optim.SGD(self.net.parameters(), lr=1.0),
            self.net,
            dataclasses.replace(form(group), replica_groups=alive),
            hpcsgd.ensemble_sync(sync_every, **how) if method is None else method,
        )

    def by(self, change: float) -> Tensor:
        """Move every parameter by `change`, and synchronize; return the model."""
        for p in self.net.parameters():
            p.grad = torch.full_like(p, -change)
        self.optimizer.step()
        return vector(self.net).clone()


def courses(
    desk: Desk,
    ranks: Sequence[int],
    changes: Sequence[Sequence[float]],
    dtype: torch.dtype = torch.float64,
    **how: Any,
) -> list[list[Tensor]]:
    """Return the models of every rank after each change of its group, which are a row of `changes`."""

    def body(g: int, group: Communicator, alive: ElasticAverage) -> list[Tensor]:
        moved = Moved(group, alive, dtype, **how)
        return [moved.by(change) for change in changes[g]]

    with desk.coordinator(len(ranks)) as at:
        return [found for of_group in replica_groups(at, ranks, body) for found in of_group]


def reference(
    means: Sequence[float], make: MakeOptimizer, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Return the models by algorithm 1 of DiLoCo in plain torch; `means` are the groups' mean changes."""
    theta = nn.Parameter(vector(model(dtype=torch.float64)).clone())
    outer = make([theta])
    models = []
    for mean in means:
        theta.grad = torch.full_like(theta, -mean)
        outer.step()
        models.append(theta.detach().to(dtype).clone())
    return models


def assert_alike(found: Sequence[Sequence[Tensor]]) -> None:
    """Check that all ranks of all groups have the same bits."""
    for course in found:
        assert all(torch.equal(x, y) for x, y in zip(course, found[0], strict=True))


@pytest.mark.parametrize("make", [NESTEROV, ADAM])
@pytest.mark.parametrize("ranks", [(1, 1, 1), (2, 1, 3)])
def test_the_steps_are_those_of_diloco(desk: Desk, ranks: tuple[int, ...], make: MakeOptimizer) -> None:
    changes = [[1.0, 2.0, -1.0, 0.5], [2.0, 2.0, -4.0, 1.5], [6.0, -1.0, 2.0, 1.0]]
    found = courses(desk, ranks, changes, outer=make)
    assert_alike(found)
    expected = reference([sum(each) / ALL for each in zip(*changes, strict=True)], make)
    for x, y in zip(found[0], expected, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("ranks", [(1, 1, 1), (2, 1, 3)])
def test_steps_by_radius_and_direction(desk: Desk, ranks: tuple[int, ...]) -> None:
    """Tensors that move in one direction take the mean; of opposite changes, the mean norm counts."""
    changes = [[1.0, 2.0, -1.0], [2.0, 2.0, -4.0], [6.0, -8.0, 2.0]]
    found = courses(desk, ranks, changes, outer=NESTEROV, merge=MERGE)
    assert_alike(found)
    plain = reference([3.0, -4 / 3, -1.0], NESTEROV)
    radial = reference([3.0, 4.0, -7 / 3], NESTEROV)
    is_matrix = torch.cat([torch.full((p.numel(),), p.ndim == 2) for p in model().parameters()])
    for x, of_vectors, of_matrices in zip(found[0], plain, radial, strict=True):
        torch.testing.assert_close(x, torch.where(is_matrix, of_matrices, of_vectors))


def test_sixteen_bits_keep_small_steps(desk: Desk) -> None:
    """θ has a wider format than the model: small steps add up, and rounding is not taken for movement."""
    make: MakeOptimizer = lambda ws: optim.SGD(ws, lr=2**-9)  # noqa: E731
    found = courses(desk, (1, 2), [[1.0] * 8] * 2, torch.bfloat16, outer=make)
    assert_alike(found)
    start = vector(model(dtype=torch.bfloat16)).double()
    moved = (found[0][-1].double() - start).mean().item()
    assert moved == pytest.approx(8 * 2**-9, rel=0.2)


def test_without_a_move_there_is_no_step(desk: Desk) -> None:
    """When a group returns, momentum alone would otherwise move the model."""
    made: list[OuterElasticMean] = []

    def body(g: int, group: Communicator, alive: ElasticAverage) -> tuple[list[Tensor], Tensor]:
        moved = Moved(group, alive, torch.float64, outer=NESTEROV)
        first = moved.by(1.0 + g)
        averager = moved.optimizer.method.averager
        assert isinstance(averager, OuterElasticMean)
        made.append(averager)
        moved.optimizer.average_models()
        return [first, vector(moved.net).clone()], moved.by(1.0)

    with desk.coordinator(ALL) as at:
        found = [one for of_group in replica_groups(at, (1, 2, 1), body) for one in of_group]
    expected = reference([2.0, 1.0], NESTEROV)
    for (first, again), last in found:
        assert torch.equal(first, again)
        torch.testing.assert_close(last, expected[1])


def test_who_is_left_out_by_a_guard_has_no_part_in_the_step(desk: Desk) -> None:
    """If all groups are left out, nothing changes, including the momentum."""
    guard = PseudoGradientPenalty(temperature=float("inf"))
    changes = [
        [1.0, 1.0, float("nan"), 2.0],
        [float("nan"), 1.0, float("nan"), 2.0],
        [3.0, 1.0, float("nan"), 2.0],
    ]
    found = courses(desk, (1, 2, 1), changes, outer=NESTEROV, guard=guard)
    assert_alike(found)
    first, second, last = reference([2.0, 1.0, 2.0], NESTEROV)
    for x, y in zip(found[0], [first, second, second, last], strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("make", [NESTEROV, ADAM])
@pytest.mark.parametrize("ranks", [(1, 1), (2, 3)])
@pytest.mark.parametrize(
    ("merge", "dtype"), [(None, torch.float64), (MERGE, torch.float64), (MERGE, torch.bfloat16)]
)
def test_who_returns_gets_the_state_of_the_others(
    desk: Desk,
    ranks: tuple[int, int],
    make: MakeOptimizer,
    merge: RadialDirectional | None,
    dtype: torch.dtype,
) -> None:
    """It begins with another model and no outer state; from its first round on it equals the others."""
    died, alone = threading.Event(), threading.Event()
    how: dict[str, Any] = {"outer_schedule": outer_schedules.piecewise(40, lr=[[0, 0.2], [1, 1.0]])}
    how |= {"outer": make, "merge": merge}

    def returning(group: Communicator, alive: ElasticAverage) -> list[Tensor]:
        Moved(group, alive, dtype, **how).by(1.0)
        alive.close()
        group.barrier()
        died.set()
        assert alone.wait(60)
        again = ElasticAverage(
            BAD, group, alive._coordinator, TOKEN, "127.0.0.1", heartbeat_timeout=HEARTBEAT_TIMEOUT
        )
        try:
            moved = Moved(group, again, dtype, **how)
            first = moved.by(1000.0)
            moved.optimizer.resume_from(again.after.place.t, [{} for _ in moved.optimizer.param_groups], None)
            return [first, moved.by(4.0), moved.by(1.0)]
        finally:
            again.close()

    def body(g: int, group: Communicator, alive: ElasticAverage) -> list[Tensor]:
        if g == BAD:
            return returning(group, alive)
        moved = Moved(group, alive, dtype, **how)
        moved.by(1.0)
        assert died.wait(60)
        moved.by(1.0)
        alone.set()
        while True:
            before = moved.by(1.0)
            if BAD in alive.members:
                return [before, moved.by(1.0), moved.by(1.0)]

    with desk.coordinator(2) as at:
        assert_alike([found for of_group in replica_groups(at, ranks, body) for found in of_group])


def test_what_is_refused() -> None:
    with pytest.raises(UserError, match="outer_schedule: it needs an outer optimizer: pass outer as well"):
        hpcsgd.ensemble_sync(1, outer_schedule=outer_schedules.muloco())
    with pytest.raises(UserError, match=r"outer: its state .* is neither a number nor a tensor of the shape"):
        hpcsgd.ensemble_sync(1, outer=lambda ws: Odd(ws, {"lr": 1.0}))
    with pytest.raises(UserError, match="outer_schedule: its rate is 0 at step 3"):
        zero = outer_schedules.piecewise(90, lr=[[0, 0.0], [0.5, 0.0], [1, 1.0]])
        hpcsgd.ensemble_sync(3, outer=NESTEROV, outer_schedule=zero)
    with pytest.raises(UserError, match="outer_schedule: its rate is 0 at step 2"):
        hpcsgd.ensemble_sync(3, outer=NESTEROV, outer_schedule=zero, num_fragments=2)


class Odd(optim.SGD):
    """An optimizer with state that is neither a number nor shaped like the model."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__(params, **defaults)

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["history"] = [0.0]
