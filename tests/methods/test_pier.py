"""Tests of Pier: DiLoCo after a lazy start."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, optim

import hpcsgd
from hpcsgd import UserError, outer_schedules
from hpcsgd.comm import Communicator
from hpcsgd.core.topology import form
from hpcsgd.methods import bsp, hierarchical, pier
from hpcsgd.parts.averagers.outer_step import OUTER_STATE
from hpcsgd.parts.quantizers import int8
from methods.test_battery import OPTIMIZERS
from references import distributed, model, one_step, same, vector

EVERY, STEPS = 2, 8


@pytest.mark.parametrize(("P", "K"), [(2, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize("optimizer", ["momentum", "AdamW"])
def test_the_lazy_start_is_synchronous_to_the_bit(run, P: int, K: int, optimizer: str) -> None:
    make = OPTIMIZERS[optimizer]
    lazy = run(P * K, lambda w: distributed(w, P, pier(EVERY, 2 * STEPS, 0.5), make, STEPS))
    plain = run(P * K, lambda w: distributed(w, P, bsp(), make, STEPS))
    for mine, theirs in zip(lazy, plain, strict=True):
        assert all(torch.equal(w, v) for w, v in zip(mine, theirs, strict=True))


@pytest.mark.parametrize(("P", "K"), [(2, 1), (4, 1), (2, 2)])
def test_the_momentum_has_a_closed_form(run, P: int, K: int) -> None:
    """m = Σ 0.9^(n−1−i)·(θ_i − θ_{i+1}) over the n movements of the lazy start; the last one ends it."""

    def trained(world: Communicator) -> tuple[Tensor, Tensor, list[Tensor]]:
        topology, net = form(world, P), model()
        method = pier(EVERY, 10, 0.6)
        optimizer = hpcsgd.DistributedOptimizer(optim.SGD(net.parameters(), lr=0.1), net, topology, method)
        at = [vector(net)]
        for t in range(6):
            one_step(net, optimizer, topology, t)
            at += [vector(net)] if (t + 1) % EVERY == 0 else []
        (kept,) = [state.sharded for state in method.state_dict().values() if "theta" in state.sharded]
        m, theta = (torch.cat(list(kept[name])) for name in (OUTER_STATE + "momentum_buffer", "theta"))
        return m, theta, at

    ranks = run(P * K, trained)
    m, theta = (torch.cat([rank[i] for rank in ranks[:K]]) for i in (0, 1))
    at = ranks[0][2]
    moved = [before - after for before, after in itertools.pairwise(at)]
    closed = sum(0.9 ** (2 - i) * x for i, x in enumerate(moved))
    # Buckets have padding, and contain the parameters in backward order.
    for own, expected in ((m, closed), (theta, at[-1])):
        assert isinstance(expected, Tensor)
        torch.testing.assert_close(own.norm(), expected.norm(), rtol=1e-12, atol=0)
        torch.testing.assert_close(own.sum(), expected.sum(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("P", "K"), [(2, 1), (2, 2), (1, 2)])
def test_without_a_lazy_start_and_by_whole_steps_it_is_local_sgd(run, P: int, K: int) -> None:
    whole = outer_schedules.piecewise(STEPS, lr=[[0, 1.0]], momentum=[[0, 0.0]])
    make = OPTIMIZERS["momentum"]
    mine = run(P * K, lambda w: distributed(w, P, pier(EVERY, STEPS, 0.0, outer_schedule=whole), make, STEPS))
    plain = run(P * K, lambda w: distributed(w, P, hierarchical(EVERY), make, STEPS))
    same(mine, list(zip(*plain[::K], strict=True)), K)


@pytest.mark.ranks(4)
def test_the_lazy_start_goes_on_after_a_restart_on_another_shape(run, tmp_path: Any) -> None:
    """The warmed-up momentum equals that of a run without an interruption."""

    def started(
        world: Communicator, P: int
    ) -> tuple[hpcsgd.DistributedOptimizer, Callable[[int, int], Tensor]]:
        topology, net = form(world, P), model()
        inner = optim.SGD(net.parameters(), lr=0.1)
        optimizer = hpcsgd.DistributedOptimizer(inner, net, topology, pier(EVERY, 8, 0.5))

        def train(first: int, last: int) -> Tensor:
            for t in range(first, last):
                one_step(net, optimizer, topology, t)
            return vector(net)

        return optimizer, train

    def both(world: Communicator) -> tuple[Tensor, Tensor]:
        before, train = started(world, 2)
        train(0, 3)
        hpcsgd.save(tmp_path / "saved", before)
        after, go_on = started(world, 4)
        hpcsgd.load(tmp_path / "saved", after)
        _, whole = started(world, 4)
        return go_on(3, 6), whole(0, 6)

    for resumed, whole in run(4, both):
        torch.testing.assert_close(resumed, whole, rtol=0, atol=1e-12)


@pytest.mark.ranks(2)
def test_in_few_bits_the_first_average_is_exact(run) -> None:
    """The average after the lazy start gives the groups a common reference, so it is not quantized."""
    make = OPTIMIZERS["SGD"]
    few = run(2, lambda w: distributed(w, 2, pier(EVERY, STEPS, 0.5, quantize=int8(block=8)), make, STEPS))
    plain = run(2, lambda w: distributed(w, 2, pier(EVERY, STEPS, 0.5), make, STEPS))
    for mine, theirs in zip(few, plain, strict=True):
        assert all(torch.equal(w, v) for w, v in zip(mine[:6], theirs[:6], strict=True))
        assert not torch.equal(mine[7], theirs[7])
        torch.testing.assert_close(mine[7], theirs[7], rtol=0, atol=0.02)


@pytest.mark.ranks(4)
def test_exdyna_divides_the_model_anew_after_the_lazy_start(run) -> None:
    """In the lazy start all ranks share the search, and later those of a group."""
    sparse = lambda: hpcsgd.Sparse(hpcsgd.ExDyna(0.2))  # noqa: E731
    new = lambda: pier(EVERY, STEPS, 0.5, grad_reduce=sparse())  # noqa: E731
    ranks = run(4, lambda w: distributed(w, 2, new(), OPTIMIZERS["SGD"], STEPS))
    for mine, theirs in zip(ranks, [ranks[0], ranks[0], ranks[2], ranks[2]], strict=True):
        assert all(torch.equal(w, v) for w, v in zip(mine, theirs, strict=True))
    assert not torch.equal(ranks[0][6], ranks[2][6])


def test_a_lazy_start_of_no_step_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        pier(50, 20_000)
        assert caplog.messages == []
        pier(50, 400)
    assert caplog.messages[0] == (
        "pier: there is no lazy start, because lazy_fraction = 0.1 of total_steps = 400 is less than "
        "sync_every = 50"
    )


def test_a_short_lazy_start_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        pier(50, 20_000, 0.05, outer_schedule=outer_schedules.piecewise(20_000, lr=[[0, 1.0]]))
        assert caplog.messages == []
        pier(50, 20_000, 0.045, outer_schedule=outer_schedules.piecewise(20_000, lr=[[0, 1.0]]))
    assert "in the stage from step 0 to 900: 18, advised are 20" in caplog.messages[0]


def test_the_schedule_begins_where_the_lazy_start_ends() -> None:
    """It begins at a multiple of the interval; 0.3 · 10 is 3 despite rounding."""
    end: Any = pier(3, 10, 0.3).averager
    assert [until for until, _ in end.sequence] == [3, None]
    late: Any = pier(50, 1_000, 0.19).sequence[1][1].averager
    assert late.schedule == outer_schedules.pier(1_000, begin=0.15)


REFUSED: dict[str, Callable[[], Any]] = {
    "lazy_fraction = 0.8: expected a fraction of the run from 0 to 0.7": lambda: pier(2, 100, 0.8),
    "lazy_fraction = -0.1: expected a fraction of the run from 0 to 0.7": lambda: pier(2, 100, -0.1),
    "total_steps = 0: expected the number of steps of the whole run, 1 to 10^12": lambda: pier(2, 0),
    "sync_every = 0: groups average after at least 1 step": lambda: pier(0, 100),
    "outer_schedule: its rate is 0 at step 12, where groups synchronize: they would lose what they have "
    "learned; let the schedule begin earlier": lambda: pier(
        2, 100, 0.1, outer_schedule=outer_schedules.pier(100, begin=0.2)
    ),
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_is_refused(line: str) -> None:
    with pytest.raises(UserError) as refused:
        REFUSED[line]()
    assert str(refused.value) == line
