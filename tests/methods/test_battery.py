"""Every method × every shape × several optimizers against plain torch, on threads and under mpiexec."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.utils._pytree import tree_map

import hpcsgd
from hpcsgd.core.graphs import Exponential, Ring
from hpcsgd.core.mixing import push_matrix, symmetric_matrix
from hpcsgd.core.topology import form
from hpcsgd.exchanges import ReduceScatter, Sparse
from hpcsgd.methods import (
    Method,
    adacomm,
    allreduce_local_sgd,
    bsp,
    d_psgd,
    diloco,
    fedavg,
    hierarchical,
    osgp,
    sgp,
    ssp,
    switch,
)
from hpcsgd.sparsifiers import Deft
from hpcsgd.transport import Transport
from local_methods import NESTEROV, adaptive, fed_averaging, with_outer
from references import (
    MakeOptimizer,
    alone,
    big_batch,
    distributed,
    gossiped,
    local_sgd,
    meet_every,
    one_step,
    pushed,
)
from references import model as make_model
from sparsifying import deft, sparsified
from trainings import WAITING_FOR_NOBODY

EVERY = 3
STEPS = 7
DENSITY = 0.2

METHODS: dict[str, Callable[[], Method]] = {
    "bsp": bsp,
    "bsp by reduce-scatter": lambda: bsp(ReduceScatter()),
    "hierarchical": lambda: hierarchical(EVERY),
    "hierarchical by reduce-scatter": lambda: hierarchical(EVERY, ReduceScatter()),
    "allreduce local SGD": lambda: allreduce_local_sgd(EVERY),
    "SGP": sgp,
    "2-OSGP": lambda: osgp(2),
    "D-PSGD": d_psgd,
    "SSP without staleness": lambda: ssp(0),
    "post-local SGD": lambda: switch(bsp(), hierarchical(EVERY), at=2),
    "FedAvg": lambda: fedavg(0.5, per_epoch=2, steps_per_epoch=5),
    "AdaComm": lambda: adacomm(EVERY, block=2),
    "DiLoCo": lambda: diloco(EVERY),
    "DEFT, local SGD": lambda: hierarchical(EVERY, Sparse(Deft(DENSITY))),
}
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD": lambda params: optim.SGD(params, lr=0.1),
    "momentum": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True),
    "AdamW": lambda params: optim.AdamW(params, lr=0.01, weight_decay=0.1),
}
SHAPES = [(P, K) for P in (1, 2, 4) for K in (1, 2, 4)]


def with_optimizers(shapes: Sequence[tuple[int, int]], optimizers: Iterable[str] = OPTIMIZERS) -> list[Any]:
    """Every shape with every optimizer; on more than four ranks `make test-long` has all but the last."""
    *_, last = optimizers
    return [
        pytest.param(P, K, name, marks=[pytest.mark.long] if P * K > 4 and name != last else [])
        for P, K in shapes
        for name in optimizers
    ]


def expected(name: str, P: int, K: int, make: MakeOptimizer) -> list[list[Tensor]]:
    """[step][group] → parameters."""
    if name.startswith("bsp"):
        return [[w] * P for w in big_batch(P * K, make, STEPS)]
    if name == "SGP":
        return gossiped(P, K, Exponential(), push_matrix, make, STEPS)
    if name == "2-OSGP":
        return gossiped(P, K, Exponential(), push_matrix, make, STEPS, staleness=2)
    if name == "SSP without staleness":
        return [[w] * P for w in pushed(P, K, make, STEPS)]
    if name == "post-local SGD":
        return local_sgd(P, K, EVERY, make, STEPS, together=2)
    if name == "FedAvg":
        return alone(P, K, make, STEPS, fed_averaging(P, 0.5, {3, 5, 8, 10}.__contains__))
    if name == "AdaComm":
        return alone(P, K, make, STEPS, adaptive(EVERY, block=2))
    if name == "DiLoCo":
        return alone(P, K, make, STEPS, with_outer(EVERY, NESTEROV))
    if name == "DEFT, local SGD":
        return sparsified(P, K, deft(DENSITY), make, STEPS, meet_every(EVERY))
    if name == "D-PSGD":
        return gossiped(P, K, Ring(), symmetric_matrix, make, STEPS)
    return local_sgd(P, K, EVERY, make, STEPS)


@pytest.mark.parametrize(("P", "K", "optimizer"), with_optimizers(SHAPES))
@pytest.mark.parametrize("method", METHODS)
def test_equals_plain_torch(run, method: str, P: int, K: int, optimizer: str) -> None:
    make = OPTIMIZERS[optimizer]
    ranks = run(P * K, lambda world: distributed(world, P, METHODS[method](), make, STEPS))
    for t, groups in enumerate(expected(method, P, K, make)):
        for rank, history in enumerate(ranks):
            torch.testing.assert_close(history[t], groups[rank // K], rtol=0, atol=1e-12)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("K", [1, 2, 4])
@pytest.mark.parametrize("method", WAITING_FOR_NOBODY)
def test_one_group_has_nobody_to_wait_for(run, method: str, K: int, optimizer: str) -> None:
    make = OPTIMIZERS[optimizer]
    ranks = run(K, lambda world: distributed(world, 1, WAITING_FOR_NOBODY[method](), make, STEPS))
    for history in ranks:
        torch.testing.assert_close(history, big_batch(K, make, STEPS), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("P", "K"), [(1, 2), (1, 4), (2, 2), (2, 4)])
@pytest.mark.parametrize("method", METHODS | WAITING_FOR_NOBODY)
def test_positions_of_a_group_hold_the_same_bits(run, method: str, P: int, K: int) -> None:
    new = (METHODS | WAITING_FOR_NOBODY)[method]
    ranks = run(P * K, lambda world: distributed(world, P, new(), OPTIMIZERS["AdamW"], STEPS))
    for rank, history in enumerate(ranks):
        first = ranks[rank - rank % K]
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(history, first, strict=True))


@pytest.mark.parametrize(("P", "K"), [(1, 1), (1, 2), (2, 2), (4, 1)])
@pytest.mark.parametrize(
    "options", [{"bucket_mb": 1e-4}, {"overlap": False}, {"bucket_mb": 1e-4, "overlap": False}]
)
def test_buckets_and_overlap_change_nothing(run, P: int, K: int, options: dict[str, float]) -> None:
    make = OPTIMIZERS["momentum"]
    plain = run(P * K, lambda world: distributed(world, P, hierarchical(EVERY), make, STEPS))
    other = run(P * K, lambda world: distributed(world, P, hierarchical(EVERY), make, STEPS, **options))
    for mine, theirs in zip(plain, other, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("P", "K", "optimizer"), with_optimizers([(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 2)])
)
@pytest.mark.parametrize("method", METHODS)
def test_state_survives_a_round_trip(run, method: str, P: int, K: int, optimizer: str) -> None:
    """Saved after 4 steps and loaded into a new model and optimizer, training goes on to the same bits.

    Where updates are added up as they come, to rounding.
    """
    make = OPTIMIZERS[optimizer]

    def whole_and_resumed(world: Transport) -> tuple[Tensor, Tensor]:
        job = form(world, groups=P)

        def new() -> tuple[nn.Module, hpcsgd.DistributedOptimizer]:
            net = make_model()
            inner = make(list(net.parameters()))
            return net, hpcsgd.DistributedOptimizer(inner, net, job, METHODS[method]())

        net, optimizer = new()
        for t in range(4):
            one_step(net, optimizer, job, t)
        weights, state = {k: v.clone() for k, v in net.state_dict().items()}, optimizer.state_dict()
        saved = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, state)
        for t in range(4, STEPS):
            one_step(net, optimizer, job, t)
        again, resumed = new()
        with torch.no_grad():
            again.load_state_dict(weights)
        resumed.load_state_dict(saved)
        for t in range(4, STEPS):
            one_step(again, resumed, job, t)
        flat = [torch.cat([p.detach().reshape(-1) for p in n.parameters()]) for n in (net, again)]
        return flat[0], flat[1]

    rounding = 1e-13 if method == "SSP without staleness" else 0
    for whole, resumed in run(P * K, whole_and_resumed):
        torch.testing.assert_close(whole, resumed, rtol=0, atol=rounding)
