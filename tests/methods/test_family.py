"""Tests of FedAvg, post-local SGD and properties of the whole local SGD family; see also the battery."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn, optim

import hpcsgd
from hpcsgd.comm import Communicator
from hpcsgd.core.graphs import Exponential
from hpcsgd.core.topology import form
from hpcsgd.errors import UserError
from hpcsgd.methods import (
    Method,
    adacomm,
    delayed,
    des_loc,
    diloco,
    fedavg,
    hierarchical,
    post_local,
    sasgd,
    sgp,
    sparseloco,
    streaming,
    switch,
)
from hpcsgd.methods.diloco import OuterOptimizer
from hpcsgd.methods.fedavg import MeanOfSome, PerEpoch
from hpcsgd.methods.sgp import PushSum
from hpcsgd.parts import quantizers
from hpcsgd.parts.averagers import AcrossShards, AverageState, PerBlock
from hpcsgd.parts.averagers.outer_step import NESTEROV
from hpcsgd.parts.grad_reduces import AllToAll, Quantized
from hpcsgd.parts.schedules import Every
from local_methods import fed_averaging
from methods.table import OF_INTERVALS
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
from shapes import some

EVERY, STEPS = 3, 8
SHAPES = [(1, 2), (2, 1), (2, 2), (4, 1)]
SGD = OPTIMIZERS["SGD"]


@pytest.mark.parametrize(("x", "S", "LSSR"), [(4, 195, 0.979), (8, 195, 0.959), (1, 1, 0.0), (3, 7, 4 / 7)])
def test_synchronizations_are_uniform_and_known_in_advance(x: int, S: int, LSSR: float) -> None:
    """0.979 and 0.959 are the values of SelSync's table I for E = 0.25 and 0.125."""
    when = PerEpoch(x, S)
    synchronizations = [t for t in range(1, 5 * S + 1) if when(SimpleNamespace(t=t))]  # type: ignore[arg-type]
    for epoch in range(5):
        assert sum(epoch * S < t <= (epoch + 1) * S for t in synchronizations) == x
        assert (epoch + 1) * S in synchronizations
    gaps = {b - a for a, b in itertools.pairwise(synchronizations)}
    assert gaps <= {S // x, -(-S // x)}
    assert 1 - len(synchronizations) / (5 * S) == pytest.approx(LSSR, abs=1e-3)


@pytest.mark.parametrize(("C", "P", "count"), [(1.0, 8, 8), (0.5, 5, 3), (0.1, 4, 1), (0.55, 100, 55)])
def test_who_is_drawn(C: float, P: int, count: int) -> None:
    """All ranks draw the same ⌈C·P⌉ groups, which depend on step and seed; every group is drawn at times."""
    draws = [MeanOfSome(C, seed=1).drawn(t, P) for t in range(200)]
    assert all(len(set(drawn)) == len(drawn) == count for drawn in draws)
    assert draws == [MeanOfSome(C, seed=1).drawn(t, P) for t in range(200)]
    assert set().union(*draws) == set(range(P))
    if count < P:
        assert len({tuple(sorted(drawn)) for drawn in draws}) > 1
        assert draws != [MeanOfSome(C, seed=2).drawn(t, P) for t in range(200)]


@pytest.mark.threads(unless={"P": 4, "K": 1, "optimizer": "AdamW"})
@pytest.mark.parametrize("optimizer", ["SGD", "momentum", "AdamW"])
@pytest.mark.parametrize(
    ("P", "K", "C"),
    [(2, 1, 0.5), (2, 2, 0.5), (4, 1, 0.6), (4, 2, 0.25), (3, 1, 0.5), (3, 2, 0.5), (5, 1, 0.3), (5, 2, 0.5)],
)
def test_all_take_the_mean_of_those_drawn(run, P: int, K: int, C: float, optimizer: str) -> None:
    """At every synchronization others are drawn; each group keeps its own optimizer state."""
    make, seed = OPTIMIZERS[optimizer], 3
    method = lambda: fedavg(C, per_epoch=4, steps_per_epoch=STEPS, seed=seed)  # noqa: E731
    ranks = run(P * K, lambda world: distributed(world, P, method(), make, STEPS))
    synchronize = fed_averaging(P, C, lambda t: t % (STEPS // 4) == 0, seed)
    same(ranks, alone(P, K, make, STEPS, synchronize), K)


@pytest.mark.parametrize(("P", "K"), SHAPES)
def test_all_leave_a_synchronization_alike(run, P: int, K: int) -> None:
    """Groups differ before a synchronization and have the same bits after it, which depend on the seed."""

    def models(world: Communicator, seed: int) -> list[Tensor]:
        method = fedavg(0.5, per_epoch=2, steps_per_epoch=STEPS, seed=seed)
        return distributed(world, P, method, SGD, STEPS)

    ranks = run(P * K, models, 0)
    for t, w in enumerate(ranks[0], 1):
        synced = t % (STEPS // 2) == 0 or P == 1
        assert all(torch.equal(w, history[t - 1]) for history in ranks) == synced
    ends = [run(P * K, models, seed)[0][-1] for seed in range(4)]
    assert any(not torch.equal(ends[0], end) for end in ends) == (P > 1)


@pytest.mark.ranks(4)
def test_with_everybody_it_is_local_sgd(run) -> None:
    everybody = lambda world: distributed(world, 2, fedavg(per_epoch=2, steps_per_epoch=6), SGD, STEPS)  # noqa: E731
    same(run(4, everybody), local_sgd(2, 2, 3, SGD, STEPS), 2)


def _late(make: Callable[[int], Method]) -> Method:
    return delayed(make(2), 2)


def _in_turn(make: Callable[[int], Method]) -> Method:
    return streaming(make(EVERY), 2, 2)


FAMILY: dict[str, Callable[[], Method]] = {
    "fedavg": lambda: fedavg(0.5, per_epoch=2, steps_per_epoch=5),
    "post_local": lambda: post_local(EVERY),
    "sasgd": lambda: sasgd(EVERY),
    "adacomm": lambda: adacomm(3, adapt_every=4),
    "diloco around push-sum": lambda: Method(
        AllToAll(), Every(1), OuterOptimizer(PushSum(Exponential(), 1), NESTEROV, lambda _: None)
    ),
    "diloco with momentum averaged": lambda: diloco(EVERY, optimizer_state=AverageState),
    "packed, delayed": lambda: delayed(hierarchical(2, quantize=quantizers.int4()), 2),
    "packed diloco, streamed": lambda: streaming(diloco(EVERY, quantize=quantizers.int8()), 3, 2),
    "sparseloco": lambda: sparseloco(EVERY, density=0.1),
    "sparseloco, delayed": lambda: delayed(sparseloco(EVERY, density=0.1, bits=4), 2),
    "sparseloco, streamed": lambda: streaming(
        sparseloco(EVERY, density=0.1, selection=AcrossShards(7)), 3, 2
    ),
    "diloco of 2 bits": lambda: diloco(2, quantize=quantizers.int2(block=8)),
    "2 bits everywhere": lambda: hierarchical(
        2, Quantized(quantizers.int2(block=8), quantizers.int2(block=8)), quantize=quantizers.int2(block=16)
    ),
    **{name: partial(make, 2) for name, make in OF_INTERVALS.items()},
    **{f"{name} delayed": partial(_late, make) for name, make in OF_INTERVALS.items()},
    **{f"{name} streamed": partial(_in_turn, make) for name, make in OF_INTERVALS.items()},
    "des_loc": lambda: des_loc(3, 1, 2, quantize=quantizers.int4()),
    "adacomm, then sasgd": lambda: switch(adacomm(2, adapt_every=1), sasgd(EVERY), at=5),
    "diloco, then gossip": lambda: switch(diloco(2), sgp(), at=5),
}


@pytest.mark.slow
@pytest.mark.threads(unless={"P": 2, "K": 2, "method": {"diloco streamed", "diloco", "packed, delayed"}})
@pytest.mark.parametrize(("P", "K"), some(SHAPES, {(2, 2)}))
@pytest.mark.parametrize("method", FAMILY)
def test_goes_on_to_the_same_bits(run, P: int, K: int, method: str) -> None:
    """A run resumes to the same bits from every step: the state of wrapped parts is saved, too."""

    def ends(world: Communicator) -> list[Tensor]:
        """Return results of a run without saving, of one that saves in every step, and of resumed runs."""
        topology = form(world, groups=P)

        def new() -> tuple[nn.Module, hpcsgd.DistributedOptimizer]:
            net = model()
            return net, hpcsgd.DistributedOptimizer(
                SGD(list(net.parameters())), net, topology, FAMILY[method]()
            )

        saved = []

        def trained(save: bool) -> Tensor:
            net, optimizer = new()
            for t in range(STEPS):
                if save:
                    saved.append((vector(net), copy.deepcopy(optimizer.state_dict())))
                one_step(net, optimizer, topology, t)
            return vector(net)

        found = [trained(save=False), trained(save=True)]
        for saved_at, (weights, state) in enumerate(saved[1:], 1):
            for last in (saved_at + 1, STEPS):  # twice: saving must not change anything
                net, optimizer = new()
                set_vector_in_place(net, weights)
                optimizer.load_state_dict(state)
                for t in range(saved_at, last):
                    one_step(net, optimizer, topology, t)
            found.append(vector(net))
        return found

    for whole, *others in run(P * K, ends):
        assert len(others) == STEPS
        assert all(torch.equal(end, whole) for end in others)


def set_vector_in_place(net: nn.Module, values: Tensor) -> None:
    with torch.no_grad():
        for p, mine in zip(
            net.parameters(), values.split([p.numel() for p in net.parameters()]), strict=True
        ):
            p.copy_(mine.view_as(p))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fedavg(0.0, steps_per_epoch=9), "fraction = 0.0: expected more than 0 and at most 1"),
        (lambda: fedavg(1.5, steps_per_epoch=9), "fraction = 1.5: expected more than 0 and at most 1"),
        (lambda: fedavg(math.nan, steps_per_epoch=9), "fraction = nan: expected a number"),
        (lambda: fedavg(per_epoch=0, steps_per_epoch=9), "per_epoch = 0: expected 1 to 9 synchronizations"),
        (lambda: fedavg(per_epoch=10, steps_per_epoch=9), "per_epoch = 10: expected 1 to 9 synchronizations"),
        (lambda: fedavg(per_epoch=0.5, steps_per_epoch=9), "per_epoch = 0.5: expected a whole number"),  # type: ignore[arg-type]
        (lambda: post_local(0), "sync_every = 0: groups average after at least 1 step"),
        (lambda: sasgd(0), "sync_every = 0: groups average after at least 1 step"),
        (lambda: adacomm(0, 5), "initial_sync_every = 0: expected a number of steps ≥ 1"),
        (lambda: adacomm(5, 0), "adapt_every = 0: expected a number of steps ≥ 1"),
        (lambda: adacomm(5, 1.5), "adapt_every = 1.5: expected a whole number"),  # type: ignore[arg-type]
        (lambda: diloco(0), "sync_every = 0: groups average after at least 1 step"),
        (lambda: sparseloco(0), "sync_every = 0: groups average after at least 1 step"),
        (lambda: sparseloco(2, bits=3), "bits = 3: expected 2, 4, 8, 16, 32"),
        (lambda: sparseloco(2, density=0), "density = 0: the share of elements to send, > 0 and ≤ 1"),
        (lambda: sparseloco(2, density=math.nan), "density = nan: expected a number"),
        (lambda: sparseloco(2, beta=1.5), "beta = 1.5: what is left of the feedback, ≥ 0 and ≤ 1"),
        (lambda: sparseloco(2, beta=math.nan), "beta = nan: expected a number"),
        (lambda: sparseloco(2, lr=0), "lr = 0: an outer learning rate, > 0"),
        (lambda: sparseloco(2, lr=math.inf), "lr = inf: an outer learning rate"),
        (lambda: sparseloco(2, selection=PerBlock(0)), "size = 0: a number of elements, ≥ 1"),
        (lambda: sparseloco(2, selection=AcrossShards(0.5)), "block = 0.5: expected a whole number"),  # type: ignore[arg-type]
        (lambda: diloco(2, "SGD"), "outer = 'SGD': expected a function that returns an Optimizer"),  # type: ignore[arg-type]
        (lambda: diloco(2, lambda params: params), "outer: it makes a list, expected a torch optimizer"),  # type: ignore[arg-type, return-value]
        (
            lambda: diloco(2, lambda _: optim.SGD([torch.zeros(2)], lr=1.0)),
            "outer: its SGD has other tensors than those that it was given: expected a function such as",
        ),
        (
            lambda: diloco(2, lambda ws: optim.SGD(ws, lr=0.0)),
            "outer: its SGD has lr = 0: expected a finite rate > 0",
        ),
        (lambda: diloco(2, lambda ws: optim.SGD(ws, lr=math.nan)), "outer: its SGD has lr = nan: expected a"),
        (lambda: diloco(2, optim.LBFGS), r"outer: step\(\) of its LBFGS fails: "),  # type: ignore[arg-type]
        (
            lambda: diloco(2, optim.Adafactor),  # type: ignore[arg-type]
            "outer: its Adafactor does not update each element separately",
        ),
    ],
)
def test_refusals(make: Callable[[], Method], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)
