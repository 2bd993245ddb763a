"""SGP and D-PSGD are compared with the same training written with mixing matrices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn, optim

import hpcsgd
from ahead import others_made
from hpcsgd.comm import Communicator, threads
from hpcsgd.core.graphs import Complete, Exponential, Graph, PowersOfTwo, Ring, UndirectedExponential
from hpcsgd.core.mixing import push_matrix, symmetric_matrix
from hpcsgd.core.topology import form
from hpcsgd.errors import UserError
from hpcsgd.methods import Method, bsp, d_psgd, osgp, sgp
from hpcsgd.methods.sgp import PushSum
from methods.test_battery import OPTIMIZERS, with_optimizers
from references import distributed, gathered_step, gossiped, model, one_step, vector
from shapes import some
from trainings import Rows

STEPS = 7
SHAPES = [(2, 1), (3, 1), (4, 1), (2, 2), (3, 2), (4, 2), (2, 4), (8, 1)]

METHODS: dict[str, tuple[Callable[[], Method], Graph, Callable[[Graph, int, int], Tensor], int]] = {
    "SGP": (sgp, Exponential(), push_matrix, 0),
    "SGP with two peers": (lambda: sgp(peers=2), Exponential(2), push_matrix, 0),
    "SGP with two powers of two": (lambda: sgp(graph=PowersOfTwo(2)), PowersOfTwo(2), push_matrix, 0),
    "SGP on a ring": (lambda: sgp(graph=Ring()), Ring(), push_matrix, 0),
    "1-OSGP": (lambda: osgp(1), Exponential(), push_matrix, 1),
    "3-OSGP with two peers": (lambda: osgp(3, peers=2), Exponential(2), push_matrix, 3),
    "D-PSGD": (d_psgd, Ring(), symmetric_matrix, 0),
    "D-PSGD, exponential": (
        lambda: d_psgd(UndirectedExponential()), UndirectedExponential(), symmetric_matrix, 0),
}  # fmt: skip


@pytest.mark.threads(unless={"P": 4, "K": 1, "optimizer": "AdamW"})
@pytest.mark.parametrize(("P", "K", "optimizer"), with_optimizers(SHAPES))
@pytest.mark.parametrize("method", METHODS)
def test_equals_the_mixing_matrix(run, method: str, P: int, K: int, optimizer: str) -> None:
    make = OPTIMIZERS[optimizer]
    new, graph, matrix, staleness = METHODS[method]
    ranks = run(P * K, lambda world: distributed(world, P, new(), make, STEPS))
    for t, groups in enumerate(gossiped(P, K, graph, matrix, make, STEPS, staleness)):
        for rank, history in enumerate(ranks):
            torch.testing.assert_close(history[t], groups[rank // K], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("P", "K", "optimizer"), with_optimizers([(2, 1), (4, 1), (2, 2), (4, 2)], ["SGD", "momentum"])
)
def test_on_the_complete_graph_it_is_bsp(run, P: int, K: int, optimizer: str) -> None:
    """By linearity this holds for any update that is linear in the gradients."""
    make = OPTIMIZERS[optimizer]
    ours = run(P * K, lambda world: distributed(world, P, sgp(graph=Complete()), make, STEPS))
    theirs = run(P * K, lambda world: distributed(world, P, bsp(), make, STEPS))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-11)


def unequal_start(
    world: Communicator, P: int, graph: Graph, steps: int
) -> tuple[Tensor, Tensor, float, float]:
    """Make steps at learning rate 0, from different parameters and push-sum weights in every group.

    Returns:
        The expected z, the z found, Σ w, and how far Σ x moved.
    """
    topology = form(world, groups=P)
    net = model().requires_grad_()
    how = PushSum(graph)
    optimizer = hpcsgd.DistributedOptimizer(
        optim.SGD(net.parameters(), lr=0.0), net, topology, Method(sgp().grad_reduce, sgp().schedule, how)
    )
    how.weight = 1.0 + topology.group_index
    with torch.no_grad():
        for p in net.parameters():
            p.add_(
                torch.randn(
                    p.shape, generator=torch.Generator().manual_seed(topology.group_index), dtype=p.dtype
                )
            )

    def totals() -> tuple[Tensor, Tensor]:
        x, w = vector(net) * how.weight, torch.tensor([how.weight], dtype=torch.float64)
        topology.inter_group.allreduce(x).wait()
        topology.inter_group.allreduce(w).wait()
        return x, w

    x, w = totals()
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.ones(1, 5, dtype=torch.float64)).sum().backward()
        optimizer.step()
    x_after, w_after = totals()
    moved = max((x_after - x).abs().max().item(), (w_after - w).abs().item())
    return x / w, vector(net), w_after.item(), moved


@pytest.mark.slow
@pytest.mark.threads(unless={"P": 4, "K": 1})
@pytest.mark.parametrize("graph", [Exponential(), Exponential(2), PowersOfTwo(2), Ring()], ids=repr)
@pytest.mark.parametrize(
    ("P", "K"), some([(2, 1), (3, 1), (4, 1), (3, 2), (4, 2), (7, 1)], {(3, 1), (4, 1), (3, 2), (7, 1)})
)
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


@pytest.mark.parametrize(("P", "K", "steps"), [(3, 1, 1), (3, 2, 1), (6, 1, 2), (9, 1, 2)])
def test_two_peers_have_the_mean_after_log3_P_steps(run, P: int, K: int, steps: int) -> None:
    """The mean is weighted: groups with a larger push-sum weight count more."""
    how = sgp(peers=2).averager
    assert isinstance(how, PushSum)
    for expected, z, _, _ in run(P * K, lambda world: unequal_start(world, P, how.graph, steps)):
        torch.testing.assert_close(z, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("P", "K"), [(3, 1), (4, 2)])
def test_on_time_it_is_the_same_bits(run, P: int, K: int) -> None:
    make = OPTIMIZERS["momentum"]
    plain = run(P * K, lambda world: distributed(world, P, sgp(), make, STEPS))
    overlapped = run(P * K, lambda world: distributed(world, P, osgp(0), make, STEPS))
    for mine, theirs in zip(plain, overlapped, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def slow_start(world: Communicator, staleness: int, folder: Path) -> int:
    """Return how many steps the other rank makes while the last one waits before its second step."""
    topology = form(world, groups=world.size)
    net = model()
    optimizer = hpcsgd.DistributedOptimizer(
        optim.SGD(net.parameters(), lr=0.1), net, topology, osgp(staleness, graph=Ring())
    )
    one_step(net, optimizer, topology, 0)
    world.barrier()
    return others_made(world, folder, partial(one_step, net, optimizer, topology), range(1, 5), staleness)


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_a_slow_group_holds_up_the_others_only_after_so_many_steps(
    run, tmp_path: Path, staleness: int
) -> None:
    """Each group has already sent its first round, so the other one may continue for `staleness` rounds."""
    assert run(2, slow_start, staleness, tmp_path)[1] == staleness


@pytest.mark.parametrize(
    ("P", "K", "peers"), [(2, 1, 1), (4, 2, 1), (2, 1, 2), (4, 1, 2), (4, 2, 2), (9, 1, 2)]
)
def test_bytes_of_a_step(run, P: int, K: int, peers: int) -> None:
    """A rank sends a shard and a weight to every neighbor, of which there are at most P − 1."""

    def recorded(world: Communicator) -> tuple[float, int]:
        topology = form(world, groups=P)
        net = nn.Linear(24, 16, bias=False)
        optimizer = hpcsgd.DistributedOptimizer(
            optim.SGD(net.parameters(), lr=0.1), net, topology, sgp(peers)
        )
        before = world.stats.totals()
        net(torch.ones(2, 24)).sum().backward()
        optimizer.step()
        return world.stats.since(before)["model_average"].bytes, min(peers, P - 1) * (24 * 16 // K * 4 + 8)

    for sent, expected in run(P * K, recorded):
        assert sent == expected


@pytest.mark.parametrize(("P", "K"), [(2, 2), (2, 4)])
def test_optimizers_that_look_at_whole_tensors(run, P: int, K: int) -> None:
    """Their steps depend on the norm of x_i, so the weight has to apply to all of it, not just one shard."""

    def trained(world: Communicator, each: int) -> list[Tensor]:
        topology = form(world, groups=P)
        net, how = model(), PushSum(Ring())
        inner = Rows(list(net.parameters()), lr=0.1)
        method = Method(sgp().grad_reduce, sgp().schedule, how)
        optimizer = hpcsgd.DistributedOptimizer(inner, net, topology, method)
        how.weight = 1.0 + topology.group_index
        history = []
        for t in range(STEPS):
            gathered_step(net, optimizer, t, range(topology.rank * each, (topology.rank + 1) * each))
            history.append(vector(net))
        return history

    alone = threads.run(P, lambda world: trained(world, K))
    for rank, mine in enumerate(run(P * K, lambda world: trained(world, 1))):
        torch.testing.assert_close(mine, alone[rank // K], rtol=0, atol=1e-12)


def test_refusals() -> None:
    with pytest.raises(UserError, match="peers = 2 and a graph"):
        sgp(peers=2, graph=Ring())
    with pytest.raises(UserError, match="edges have to go both ways"):
        d_psgd(Exponential())
    with pytest.raises(UserError, match="peers = 0"):
        sgp(peers=0)
    with pytest.raises(UserError, match="overlap_steps = -1"):
        osgp(-1)
