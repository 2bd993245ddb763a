"""Tests of DiLoCo: an outer optimizer around any averager."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, optim

import hpcsgd
from hpcsgd.comm import Communicator
from hpcsgd.core.graphs import Exponential
from hpcsgd.core.topology import form
from hpcsgd.errors import UserError
from hpcsgd.methods import (
    METHODS,
    Method,
    diloco,
    hierarchical,
)
from hpcsgd.methods.diloco import OuterOptimizer
from hpcsgd.methods.fedavg import MeanOfSome
from hpcsgd.methods.sgp import PushSum
from hpcsgd.parts.averagers import AverageState, Mean, MeanOfAll, ResetState
from hpcsgd.parts.averagers.outer_step import NESTEROV
from hpcsgd.parts.grad_reduces import AllReduce, AllToAll
from hpcsgd.parts.schedules import Every
from local_methods import with_outer
from methods.table import REFERENCES
from methods.test_battery import OPTIMIZERS
from references import (
    alone,
    distributed,
    local_sgd,
    model,
    one_step,
    same,
    vector,
)

EVERY, STEPS = 3, 8
SHAPES = [(1, 2), (2, 1), (2, 2), (4, 1)]
SGD = OPTIMIZERS["SGD"]


@pytest.mark.threads(unless={"P": 2, "K": 2, "optimizer": "AdamW"})
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("P", "K"), SHAPES)
def test_an_outer_step_of_one_is_the_mean(run, P: int, K: int, optimizer: str) -> None:
    outer = lambda params: optim.SGD(params, lr=1.0)  # noqa: E731
    make = OPTIMIZERS[optimizer]
    ranks = run(P * K, lambda world: distributed(world, P, diloco(EVERY, outer), make, STEPS))
    same(ranks, local_sgd(P, K, EVERY, make, STEPS), K)


@pytest.mark.threads(unless={"P": 2, "K": 2})
@pytest.mark.parametrize(
    ("grad_reduce", "inner"), [(AllToAll(), Mean()), (AllToAll(), MeanOfAll()), (AllReduce(), MeanOfAll())]
)
@pytest.mark.parametrize("outer", [NESTEROV, lambda params: optim.AdamW(params, lr=0.02)])
@pytest.mark.parametrize(("P", "K"), SHAPES)
def test_an_outer_optimizer_on_shards_and_on_all_of_w(
    run, P: int, K: int, outer: Any, grad_reduce: Any, inner: Any
) -> None:
    def models(world: Communicator) -> list[Tensor]:
        method = Method(grad_reduce, Every(2), OuterOptimizer(inner, outer, lambda _: None))
        return distributed(world, P, method, OPTIMIZERS["AdamW"], STEPS, bucket_cap_mb=1e-4)

    expected = alone(P, K, OPTIMIZERS["AdamW"], STEPS, with_outer(2, outer))
    same(run(P * K, models), expected, K)


@pytest.mark.parametrize(("P", "K"), [(2, 1), (2, 2), (4, 1)])
def test_the_outer_state_is_of_the_own_shard(run, P: int, K: int) -> None:
    def held(world: Communicator) -> tuple[int, int]:
        method = diloco(1)
        distributed(world, P, method, SGD, 1)
        shards = method.state_dict()["averager"].sharded
        theta, momentum = shards["theta"], shards["outer momentum_buffer"]
        return sum(x.numel() for x in theta), sum(x.numel() for x in momentum)

    M = vector(model()).numel()
    assert run(P * K, held) == [(-(-M // K),) * 2] * (P * K)


def gossiping(world: Communicator, P: int, weight: float, outer: Any) -> list[Tensor]:
    """Train with push-sum, where the first group has a different weight from the others."""
    push_sum = PushSum(Exponential())
    push_sum.weight = weight if world.rank * P < world.size else 1.0
    how = push_sum if outer is None else OuterOptimizer(push_sum, outer, lambda _: None)
    return distributed(world, P, Method(AllToAll(), Every(1), how), SGD, STEPS)


@pytest.mark.parametrize(("P", "K"), [(2, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_a_whole_step_around_gossip_is_gossip(run, P: int, K: int, weight: float) -> None:
    """Where groups have different models each continues from its own θ; the outer step uses z, not x."""
    plain = run(P * K, gossiping, P, weight, None)
    wrapped = run(P * K, gossiping, P, weight, lambda params: optim.SGD(params, lr=1.0))
    same(wrapped, list(zip(*plain[::K], strict=True)), K)


@pytest.mark.parametrize(("P", "K"), [(2, 1), (4, 1), (2, 2)])
def test_the_first_step_is_from_the_start(run, P: int, K: int) -> None:
    """The averager's changes to the model before the update make no difference."""
    plain = run(P * K, gossiping, P, 3.0, None)
    half = run(P * K, gossiping, P, 3.0, lambda params: optim.SGD(params, lr=0.5))
    for mine, theirs in zip(half, plain, strict=True):
        torch.testing.assert_close(mine[0], (vector(model()) + theirs[0]) / 2, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("P", "K"), [(2, 1), (2, 2)])
def test_two_groups_that_gossip_agree(run, P: int, K: int) -> None:
    """With an outer Nesterov step it is DiLoCo that synchronizes in every step."""
    same(run(P * K, gossiping, P, 1.0, NESTEROV), alone(P, K, SGD, STEPS, with_outer(1, NESTEROV)), K)


@pytest.mark.ranks(4)
def test_outer_around_the_mean_of_some(run) -> None:
    def models(world: Communicator, outer: Any) -> list[Tensor]:
        some = MeanOfSome(0.5, seed=0)
        how = some if outer is None else OuterOptimizer(some, outer, lambda _: None)
        return distributed(world, 4, Method(AllToAll(), Every(2), how), SGD, STEPS)

    plain = run(4, models, None)
    wrapped = run(4, models, lambda params: optim.SGD(params, lr=1.0))
    same(wrapped, list(zip(*plain, strict=True)), 1)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("moments", [AverageState, ResetState])
def test_optimizer_state_goes_around_the_outer_step(run, moments: Any) -> None:
    """With an outer step of one, the optimizer state is treated as in local SGD."""
    outer = lambda params: optim.SGD(params, lr=1.0)  # noqa: E731
    make = OPTIMIZERS["AdamW"]
    ranks = run(2, lambda w: distributed(w, 2, diloco(EVERY, outer, optimizer_state=moments), make, STEPS))
    plain = run(2, lambda w: distributed(w, 2, hierarchical(EVERY, optimizer_state=moments), make, STEPS))
    same(ranks, list(zip(*plain, strict=True)), 1)


@pytest.mark.ranks(2)
def test_a_state_of_another_outer_optimizer_is_refused(run) -> None:
    adam: Any = lambda ws: optim.Adam(ws, lr=0.1)  # noqa: E731

    def resumed(world: Communicator, before: Any, after: Any) -> None:
        topology, state = form(world, 2), {}
        for make in (before, after):
            net = model()
            inner = optim.SGD(net.parameters(), lr=0.1)
            optimizer = hpcsgd.DistributedOptimizer(inner, net, topology, diloco(1, make))
            if state:
                optimizer.load_state_dict(state)
            one_step(net, optimizer, topology, 0)
            state = optimizer.state_dict()

    run(2, resumed, NESTEROV, lambda ws: optim.SGD(ws, lr=1.0))
    with pytest.raises(UserError) as refused:
        run(2, resumed, NESTEROV, adam)
    assert str(refused.value) == (
        "outer: the checkpoint has no exp_avg of Adam, but momentum_buffer: continue with the outer "
        "optimizer that was saved"
    )


STILL: dict[str, Callable[[], Method]] = {
    "diloco": lambda: diloco(1, outer=lambda ws: optim.SGD(ws, lr=0.1)),
    **{
        case.method: partial(METHODS[case.method], **case.still)
        for case in REFERENCES.values()
        if case.still is not None
    },
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("method", STILL)
def test_rounding_to_16_bits_is_no_movement(run, method: str, dtype: torch.dtype) -> None:
    """Groups move by an ulp of bfloat16 in each of 9 rounds, and then no more.

    θ moves as far as in float32, and stays there.
    """
    ulp = 2.0**-7

    def ends(world: Communicator) -> tuple[float, float]:
        net = torch.nn.Linear(4, 2, bias=False).to(dtype)
        made = STILL[method]()
        with torch.no_grad():
            net.weight.fill_(1.0)
        inner = optim.SGD(net.parameters(), lr=1.0)
        optimizer = hpcsgd.DistributedOptimizer(inner, net, form(world, 2), made)

        def moved(steps: int, by: float) -> float:
            for _ in range(steps):
                net.weight.grad = torch.full_like(net.weight, -by)
                optimizer.step()
            (state,) = (s.sharded for s in made.state_dict().values() if s.sharded)
            return (state["phi" if "phi" in state else "theta"][0][0].item() - 1) / ulp

        return moved(9, ulp), moved(5, 0.0)

    for after, later in run(2, ends):
        assert after == pytest.approx(0.9, abs=1e-3)
        assert later == after
