"""The recorded bytes equal the formulas of the hierarchical local SGD paper (eqs. 5 to 8) exactly."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from torch import nn, optim

import hpcsgd
from hpcsgd.comm import Communicator
from hpcsgd.core.topology import form
from hpcsgd.methods import Method, adacomm, allreduce_local_sgd, bsp, diloco, fedavg, hierarchical, sasgd
from hpcsgd.parts.averagers import AverageState
from hpcsgd.parts.grad_reduces import ReduceScatter

SHAPES = [(1, 2), (2, 2), (4, 1), (2, 4), (4, 2), (1, 4), (2, 1)]
EVERY, STEPS = 2, 6
WIDTH = 4  # bytes of a float32
M = 16 * 24


def recorded(
    world: Communicator, P: int, method: Method, momentum: float = 0.9, lr: float = 0.1
) -> dict[str, float]:
    """Return the bytes of STEPS steps by phase, without those of the setup."""
    topology = form(world, groups=P)
    net = nn.Linear(24, 16, bias=False)
    inner = optim.SGD(net.parameters(), lr=lr, momentum=momentum)
    optimizer = hpcsgd.DistributedOptimizer(inner, net, topology, method)
    before = world.stats.totals()
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = net(torch.ones(2, 24)).square().mean()
        loss.backward()
        optimizer.step(loss=loss)
    return {name: total.bytes for name, total in world.stats.since(before).items() if total.bytes}


def T0(K: int, M: int = M) -> Fraction:
    """Return the bytes of a step with all-to-all (eq. 6); the allgather T2 (eq. 8) takes as many."""
    return Fraction(M * (K - 1), K) * WIDTH


def T1(P: int, K: int, M: int = M) -> Fraction:
    """Return the bytes of a synchronization (eq. 7)."""
    return 2 * Fraction(M, K) * Fraction(P - 1, P) * WIDTH


def allreduce(p: int, M: int = M) -> Fraction:
    """Return the bytes of Rabenseifner's allreduce (eq. 4)."""
    return 2 * Fraction(p - 1, p) * M * WIDTH


def without_zeros(**phases: Fraction) -> dict[str, float]:
    return {name: float(value) for name, value in phases.items() if value}


def of_distance(P: int, K: int) -> Fraction:
    return 2 * (Fraction(K - 1, K) + Fraction(P - 1, P)) * 8


@pytest.mark.threads(unless={"P": 2, "K": 2})
@pytest.mark.parametrize(("P", "K"), SHAPES)
@pytest.mark.parametrize("grad_reduce", [None, ReduceScatter()])
def test_hierarchical(run, P: int, K: int, grad_reduce: ReduceScatter | None) -> None:
    method = hierarchical(EVERY, grad_reduce) if grad_reduce else hierarchical(EVERY)
    num_syncs = STEPS // EVERY if P > 1 else 0
    expected = without_zeros(
        grad_reduce=STEPS * T0(K),
        param_gather=STEPS * T0(K),
        model_average=num_syncs * T1(P, K),
        distance=num_syncs * of_distance(P, K),
    )
    for counted in run(P * K, recorded, P, method):
        assert counted == expected


SYNCHRONIZED_AS_MUCH: dict[str, Callable[[], Method]] = {
    "FedAvg": lambda: fedavg(0.5, per_epoch=3, steps_per_epoch=STEPS),
    "SASGD": lambda: sasgd(EVERY),
    "DiLoCo": lambda: diloco(EVERY),
}


@pytest.mark.threads(unless={"P": 2, "K": 2})
@pytest.mark.parametrize(("P", "K"), SHAPES)
@pytest.mark.parametrize("method", SYNCHRONIZED_AS_MUCH)
def test_others_that_synchronize_so_often(run, P: int, K: int, method: str) -> None:
    """Averages of models, sums of gradients and outer optimizers send the same number of elements."""
    expected = run(P * K, recorded, P, hierarchical(EVERY), 0.0)
    counted = run(P * K, lambda world: recorded(world, P, SYNCHRONIZED_AS_MUCH[method](), 0.0))
    assert counted == expected


@pytest.mark.threads(unless={"P": 2, "K": 2})
@pytest.mark.parametrize(("P", "K"), SHAPES)
def test_adacomm(run, P: int, K: int) -> None:
    """With a constant loss groups synchronize after steps 2, 3, …, and reduce two numbers each time."""
    num_syncs = STEPS - 1 if P > 1 else 0
    expected = without_zeros(
        grad_reduce=STEPS * T0(K),
        param_gather=STEPS * T0(K),
        model_average=num_syncs * T1(P, K),
        distance=num_syncs * of_distance(P, K),
        loss=num_syncs * 2 * Fraction(P * K - 1, P * K) * 16,
    )

    def stagnating(world: Communicator) -> dict[str, float]:
        return recorded(world, P, adacomm(2, adapt_every=1), lr=0.0)

    for counted in run(P * K, stagnating):
        assert counted == expected


@pytest.mark.threads(unless={"P": 2, "K": 2})
@pytest.mark.parametrize(("P", "K"), SHAPES)
def test_the_papers_baseline(run, P: int, K: int) -> None:
    num_syncs = STEPS // EVERY if P > 1 else 0
    expected = without_zeros(
        grad_reduce=STEPS * allreduce(K),
        model_average=num_syncs * allreduce(P),
        distance=num_syncs * 2 * Fraction(P - 1, P) * 8,
    )
    for counted in run(P * K, recorded, P, allreduce_local_sgd(EVERY)):
        assert counted == expected


@pytest.mark.threads(unless={"P": 2, "K": 2})
@pytest.mark.parametrize(("P", "K"), SHAPES)
def test_bsp(run, P: int, K: int) -> None:
    """In two levels each rank sends M/K over the slow links between groups."""
    expected = without_zeros(grad_reduce=STEPS * (T0(K) + T1(P, K)), param_gather=STEPS * T0(K))
    for counted in run(P * K, recorded, P, bsp()):
        assert counted == expected


@pytest.mark.parametrize(("P", "K"), [(2, 2), (4, 2)])
def test_averaged_optimizer_state_is_counted_separately(run, P: int, K: int) -> None:
    """They have a phase of their own, and 16 bytes more check that all ranks average the same state."""
    num_syncs = STEPS // EVERY
    for counted in run(P * K, recorded, P, hierarchical(EVERY, optimizer_state=AverageState)):
        assert counted["model_average"] == float(num_syncs * T1(P, K))
        assert counted["state_average"] == float(num_syncs * (T1(P, K) + allreduce(P, 4)))


@pytest.mark.parametrize(("P", "K"), [(1, 4), (2, 4)])
def test_padding_adds_itself_and_no_more(run, P: int, K: int) -> None:
    """21 elements are sent as 24 among 4 shards: a shard has ⌈M/K⌉ elements."""

    def padded(world: Communicator) -> dict[str, float]:
        topology = form(world, groups=P)
        net = nn.Linear(7, 3)  # 24 elements in total, 3 of them biases, in one bucket without padding
        odd = nn.Linear(6, 3)  # 21 elements, with 3 of padding
        counts = []
        for model in (net, odd):
            optimizer = hpcsgd.DistributedOptimizer(
                optim.SGD(model.parameters(), 0.1), model, topology, bsp()
            )
            before = world.stats.totals()
            model(torch.ones(1, model.in_features)).sum().backward()
            optimizer.step()
            counts.append(world.stats.since(before)["param_gather"].bytes)
        return dict(zip(("whole", "odd"), counts, strict=True))

    for counted in run(P * K, padded):
        assert counted["whole"] == counted["odd"] == float(T0(K, 24))
