"""SGP and D-PSGD against the same training written down with mixing matrices."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn, optim

import hpcsgd
from hpcsgd.errors import UserError
from hpcsgd.graphs import (
    Complete,
    Exponential,
    Graph,
    Ring,
    UndirectedExponential,
    push_matrix,
    symmetric_matrix,
)
from hpcsgd.methods import Method, bsp, d_psgd, sgp
from hpcsgd.methods.sgp import PushSum
from hpcsgd.topology import form
from hpcsgd.transport import Transport, threads
from methods.test_battery import OPTIMIZERS
from references import distributed, gathered_step, gossiped, model, vector
from trainings import Rows

STEPS = 7
SHAPES = [(2, 1), (3, 1), (4, 1), (2, 2), (3, 2), (4, 2), (2, 4), (8, 1)]

METHODS: dict[str, tuple[Callable[[], Method], Graph, Callable[[Graph, int, int], Tensor]]] = {
    "SGP": (sgp, Exponential(), push_matrix),
    "SGP with two peers": (lambda: sgp(peers=2), Exponential(2), push_matrix),
    "SGP on a ring": (lambda: sgp(graph=Ring()), Ring(), push_matrix),
    "D-PSGD": (d_psgd, Ring(), symmetric_matrix),
    "D-PSGD, exponential": (
        lambda: d_psgd(UndirectedExponential()), UndirectedExponential(), symmetric_matrix
    ),
}  # fmt: skip


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("P", "K"), SHAPES)
@pytest.mark.parametrize("method", METHODS)
def test_equals_the_mixing_matrix(run, method: str, P: int, K: int, optimizer: str) -> None:
    make = OPTIMIZERS[optimizer]
    new, graph, matrix = METHODS[method]
    ranks = run(P * K, lambda world: distributed(world, P, new(), make, STEPS))
    for t, groups in enumerate(gossiped(P, K, graph, matrix, make, STEPS)):
        for rank, history in enumerate(ranks):
            torch.testing.assert_close(history[t], groups[rank // K], rtol=0, atol=1e-12)


@pytest.mark.parametrize("optimizer", ["SGD", "momentum"])
@pytest.mark.parametrize(("P", "K"), [(2, 1), (4, 1), (2, 2), (4, 2)])
def test_on_the_complete_graph_it_is_bsp(run, P: int, K: int, optimizer: str) -> None:
    """By linearity, for any update that is linear in the gradients."""
    make = OPTIMIZERS[optimizer]
    ours = run(P * K, lambda world: distributed(world, P, sgp(graph=Complete()), make, STEPS))
    theirs = run(P * K, lambda world: distributed(world, P, bsp(), make, STEPS))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-11)


def unequal_start(world: Transport, P: int, graph: Graph, steps: int) -> tuple[Tensor, Tensor, float, float]:
    """Parameters and weights of their own on every group, and then steps at the rate 0.

    Returns what z should come to, z, Σ w, and how far Σ x moved.
    """
    job = form(world, groups=P)
    net = model().requires_grad_()
    how = PushSum(graph)
    optimizer = hpcsgd.DistributedOptimizer(
        optim.SGD(net.parameters(), lr=0.0), net, job, Method(sgp().exchange, sgp().when, how)
    )
    how.weight = 1.0 + job.g
    with torch.no_grad():
        for p in net.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(job.g), dtype=p.dtype))

    def totals() -> tuple[Tensor, Tensor]:
        x, w = vector(net) * how.weight, torch.tensor([how.weight], dtype=torch.float64)
        job.cross.allreduce(x).wait()
        job.cross.allreduce(w).wait()
        return x, w

    x, w = totals()
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.ones(1, 5, dtype=torch.float64)).sum().backward()
        optimizer.step()
    x_after, w_after = totals()
    moved = max((x_after - x).abs().max().item(), (w_after - w).abs().item())
    return x / w, vector(net), w_after.item(), moved


@pytest.mark.parametrize("graph", [Exponential(), Exponential(2), Ring()], ids=repr)
@pytest.mark.parametrize(("P", "K"), [(2, 1), (3, 1), (4, 1), (3, 2), (4, 2), (7, 1)])
def test_without_updates_all_reach_the_weighted_mean(run, graph: Graph, P: int, K: int) -> None:
    for expected, z, total, moved in run(P * K, lambda world: unequal_start(world, P, graph, 120)):
        torch.testing.assert_close(z, expected, rtol=0, atol=1e-9)
        assert total == pytest.approx(P * (P + 1) / 2, abs=1e-12)
        assert moved < 1e-12 * 120


@pytest.mark.parametrize(("P", "K"), [(2, 1), (4, 1), (8, 1), (4, 2)])
def test_exactly_after_log2_P_steps(run, P: int, K: int) -> None:
    for expected, z, _, _ in run(
        P * K, lambda world: unequal_start(world, P, Exponential(), P.bit_length() - 1)
    ):
        torch.testing.assert_close(z, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("P", "K"), [(2, 1), (4, 2)])
def test_bytes_of_a_step(run, P: int, K: int) -> None:
    """A chunk and a weight to every peer."""

    def recorded(world: Transport) -> tuple[float, int]:
        job = form(world, groups=P)
        net = nn.Linear(24, 16, bias=False)
        optimizer = hpcsgd.DistributedOptimizer(optim.SGD(net.parameters(), lr=0.1), net, job, sgp())
        before = world.ledger.totals()
        net(torch.ones(2, 24)).sum().backward()
        optimizer.step()
        return world.ledger.since(before)["average"].bytes, 24 * 16 // K * 4 + 8

    for sent, expected in run(P * K, recorded):
        assert sent == expected


@pytest.mark.parametrize("K", [2, 4])
def test_optimizers_that_look_at_whole_tensors(run, K: int) -> None:
    """Their steps depend on the norm of x_i: the weight has to reach all of it, not the own chunk alone."""

    def trained(world: Transport, each: int) -> list[Tensor]:
        job = form(world, groups=2)
        net, how = model(), PushSum(Ring())
        inner = Rows(list(net.parameters()), lr=0.1)
        method = Method(sgp().exchange, sgp().when, how)
        optimizer = hpcsgd.DistributedOptimizer(inner, net, job, method)
        how.weight = 1.0 + job.g
        history = []
        for t in range(STEPS):
            gathered_step(net, optimizer, t, range(job.rank * each, (job.rank + 1) * each))
            history.append(vector(net))
        return history

    alone = threads.run(2, lambda world: trained(world, K))
    for rank, mine in enumerate(run(2 * K, lambda world: trained(world, 1))):
        torch.testing.assert_close(mine, alone[rank // K], rtol=0, atol=1e-12)


def test_refusals() -> None:
    with pytest.raises(UserError, match="peers = 2 and a graph"):
        sgp(peers=2, graph=Ring())
    with pytest.raises(UserError, match="edges have to go both ways"):
        d_psgd(Exponential())
    with pytest.raises(UserError, match="peers = 0"):
        sgp(peers=0)
