"""Tests of AdaComm: how the synchronization interval follows the loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import hpcsgd
from hpcsgd.comm import Communicator
from hpcsgd.core.topology import form
from hpcsgd.errors import UserError
from hpcsgd.methods import (
    adacomm,
)
from hpcsgd.methods.adacomm import Adaptive
from local_methods import adaptive
from methods.test_battery import OPTIMIZERS
from references import (
    alone,
    batch,
    loss,
    model,
    one_step,
    vector,
)

EVERY, STEPS = 3, 8
SHAPES = [(1, 2), (2, 1), (2, 2), (4, 1)]
SGD = OPTIMIZERS["SGD"]


def at(t: int, lr: float, loss: float) -> Any:
    """Return the context of step `t` as a schedule sees it, with this rank alone."""
    world = SimpleNamespace(allreduce=lambda *_: SimpleNamespace(wait=lambda: None))
    job = SimpleNamespace(world=world, size=1)
    return SimpleNamespace(t=t, lr=lr, loss=loss, topology=job, metrics={})


def intervals_of(when: Adaptive, steps: list[tuple[float, float]]) -> list[int]:
    """Return the interval in force in each step, given the learning rate and loss of each step."""
    notes = []
    for t, (lr, F) in enumerate(steps, 1):
        s = at(t, lr, F)
        when(s)
        notes.append(s.metrics["interval"])
    return notes


def test_the_interval_shrinks_as_the_loss_falls() -> None:
    """The interval is ⌈√(F/F_0)·I_0⌉ with the mean loss of each block; each block here is one interval."""
    losses = [4.0] + [2.0] * 7 + [1.0] * 6 + [0.25] * 4
    assert 8 * math.sqrt(sum(losses[:8]) / 8 / 4) == pytest.approx(6.0)
    found = intervals_of(Adaptive(8, block=1), [(0.1, F) for F in losses])
    assert found == [8] * 8 + [6] * 6 + [4] * 4
    assert intervals_of(Adaptive(8, block=12), [(0.1, F) for F in losses]) == [8] * 16 + [5] * 2


def test_the_interval_is_halved_where_the_loss_stagnates() -> None:
    found = intervals_of(Adaptive(10, block=1), [(0.1, 1.0)] * 40)
    assert found == [10] * 10 + [5] * 5 + [3] * 3 + [2] * 2 + [1] * 20
    assert intervals_of(Adaptive(5, block=1), [(0.1, F) for F in (1, 1, 1, 1, 1, 9, 9, 9, 9)]) == [
        *[5] * 5,
        *[3] * 3,
        2,
    ]


def test_the_interval_is_never_below_one() -> None:
    assert set(intervals_of(Adaptive(4, block=1), [(0.1, 1.0)] + [(0.1, 0.0)] * 20)[12:]) == {1}
    assert min(intervals_of(Adaptive(4, block=1), [(0.1, 1.0)] + [(0.1, -1.0)] * 20)) == 1


def test_a_lower_rate_allows_more() -> None:
    """√(η_0/η) = 2, so 4 steps count as 8; √2·8 is not below 8, but √0.56·8 is."""
    first = [(0.4, 1.0)] * 8
    assert intervals_of(Adaptive(8, block=1), first + [(0.1, 0.5)] * 5) == [8] * 8 + [4] * 5
    assert intervals_of(Adaptive(8, block=1), first + [(0.1, 0.14)] * 5) == [8] * 8 + [4] * 4 + [6]
    assert intervals_of(Adaptive(8, block=1), first + [(0.0, 0.5)] * 5) == [8] * 8 + [4] * 4 + [2]


def test_a_warm_up_is_no_low_first_rate() -> None:
    """η_0 is the highest rate so far: while the rate climbs, the loss alone decides."""
    losses = [1.0] + [0.36] * 7 + [0.09] * 7
    found = intervals_of(Adaptive(8, block=1), [(0.01 * t, F) for t, F in enumerate(losses, 1)])
    assert found == [8] * 8 + [math.ceil(math.sqrt(0.44) * 8)] * 6 + [math.ceil(math.sqrt(0.09) * 8)]
    assert found[-2:] == [6, 3]


@pytest.mark.parametrize(("P", "K"), SHAPES)
def test_all_ranks_have_the_interval_of_all_losses(run, P: int, K: int) -> None:
    """All ranks have one interval although their losses differ; a single group has no interval."""

    def noted(world: Communicator) -> list[float | None]:
        topology, net = form(world, groups=P), model()
        optimizer = hpcsgd.DistributedOptimizer(
            SGD(list(net.parameters())), net, topology, adacomm(6, adapt_every=2)
        )
        found = []
        for t in range(24):
            one_step(net, optimizer, topology, t)
            found.append(optimizer.metrics.get("interval"))
        return found

    expected: list[int] = []
    alone(P, K, SGD, 24, adaptive(6, 2, expected))
    assert len(set(expected)) > 2
    assert run(P * K, noted) == [expected if P > 1 else [None] * 24] * (P * K)


@pytest.mark.parametrize(("P", "K"), [(2, 1), (2, 2), (4, 1), (1, 2)])
def test_no_rank_goes_by_its_own_loss(run, P: int, K: int) -> None:
    """The interval follows the mean over all ranks, not over one rank or over ranks of one shard index.

    The losses of the last rank fall the most.
    """
    steps = 40

    def loss_of(rank: int, t: int) -> float:
        return 1.0 / (1.0 + 4 * rank * t)

    def noted(world: Communicator) -> list[float | None]:
        topology, net = form(world, groups=P), model()
        optimizer = hpcsgd.DistributedOptimizer(
            SGD(list(net.parameters())), net, topology, adacomm(16, adapt_every=8)
        )
        found = []
        for t in range(steps):
            optimizer.step(loss=loss_of(world.rank, t))
            found.append(optimizer.metrics.get("interval"))
        return found

    def by(ranks: Sequence[int]) -> list[int]:
        losses = [sum(loss_of(rank, t) for rank in ranks) / len(ranks) for t in range(steps)]
        return intervals_of(Adaptive(16, block=8), [(0.1, F) for F in losses])

    expected = by(range(P * K)) if P > 1 else [None] * steps
    assert all(by([rank]) != expected for rank in range(P * K))
    assert K == 1 or all(by(range(j, P * K, K)) != expected for j in range(K))
    assert run(P * K, noted) == [expected] * (P * K)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("P", [2, 4])
def test_the_state_of_any_rank_has_the_losses_of_all(run, P: int) -> None:
    """A state saved by one rank has the mean losses of all ranks, and can be loaded on another P × K."""

    def means(world: Communicator) -> tuple[list[float], list[float]]:
        topology, net = form(world, groups=2), model()
        optimizer = hpcsgd.DistributedOptimizer(
            SGD(list(net.parameters())), net, topology, adacomm(4, adapt_every=4)
        )
        found = [one_loss(net, optimizer, t) for t in range(6)]
        (first,) = world.gather_objects(optimizer.state_dict())[:1]
        resumed = adacomm(4, adapt_every=4)
        again = model()
        inner = SGD(list(again.parameters()))
        hpcsgd.DistributedOptimizer(inner, again, form(world, groups=P), resumed).load_state_dict(first)
        state = resumed.schedule.block_state  # type: ignore[attr-defined]
        return [found[0], sum(found[4:])], [state.first_loss, state.losses]

    def one_loss(net: Any, optimizer: hpcsgd.DistributedOptimizer, t: int) -> float:
        optimizer.zero_grad()
        value = loss(net, *batch(t, optimizer.topology.rank))
        value.backward()
        optimizer.step(loss=value)
        return value.item()

    ranks = run(4, means)
    expected = [sum(numbers) / 4 for numbers in zip(*(own for own, _ in ranks), strict=True)]
    for _, found in ranks:
        assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.ranks(2)
def test_a_closure_gives_the_loss_too(run) -> None:
    def trained(world: Communicator, closing: bool, giving: bool) -> Tensor:
        topology, net = form(world, groups=2), model()
        optimizer = hpcsgd.DistributedOptimizer(
            SGD(list(net.parameters())), net, topology, adacomm(2, adapt_every=2)
        )

        def closure() -> Tensor:
            optimizer.zero_grad()
            value = loss(net, *batch(0, topology.rank))
            value.backward()
            return value

        for _ in range(4):
            if closing:
                optimizer.step(closure)
            else:
                value = closure()
                optimizer.step(loss=value if giving else None)
        return vector(net)

    closed, given = run(2, trained, True, False), run(2, trained, False, True)
    assert all(torch.equal(a, b) for a, b in zip(closed, given, strict=True))
    with pytest.raises(
        UserError, match=r"give it as optimizer.step\(loss=loss\), or give step\(\) a closure"
    ):
        run(2, trained, False, False)


@pytest.mark.parametrize("losses", [[0.0, 0.0], [-1.0, 1.0], [1.0, math.nan], [1.0, math.inf]])
def test_losses_that_say_nothing(losses: list[float]) -> None:
    with pytest.raises(UserError, match=r"the loss was .* at first and is .* now: expected more than 0"):
        intervals_of(Adaptive(2, block=1), [(0.1, F) for F in losses])
