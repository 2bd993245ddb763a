"""Tests of SparseLoCo beyond the battery.

Dense and with a whole outer step it is DiLoCo, it sends the bytes of its formula, and groups keep exactly
what they did not send.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim

import hpcsgd
from hpcsgd.comm import Communicator
from hpcsgd.core.topology import form
from hpcsgd.core.traffic import ModelLayout
from hpcsgd.methods import Method, delayed, diloco, sparseloco, streaming
from hpcsgd.methods.sparseloco import VALUES
from hpcsgd.parts.averagers import AcrossShards, MedianNorm, OverGroups, OverSenders, PerBlock
from methods.test_battery import OPTIMIZERS
from references import alone, batch, distributed, loss, model, same, vector
from sparse_deltas import over_positions, per_run, sparse_synchronizations

STEPS, EVERY = 9, 2


class OnAGrid(nn.Module):
    """A model whose gradients have few bits and depend on rank and step, so that all sums are exact."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        start = torch.randint(-64, 64, (23,), generator=torch.Generator().manual_seed(0)).to(dtype) / 8
        self.w = nn.Parameter(start)

    def forward(self, t: int, rank: int) -> Tensor:
        chance = torch.Generator().manual_seed(100 * t + rank)
        return (self.w * torch.randint(-8, 8, (23,), generator=chance).to(self.w.dtype)).sum()


def on_a_grid(world: Communicator, P: int, method: Method, dtype: torch.dtype) -> list[Tensor]:
    topology, net = form(world, P), OnAGrid(dtype)
    optimizer = hpcsgd.DistributedOptimizer(optim.SGD(net.parameters(), lr=0.125), net, topology, method)
    history = []
    for t in range(STEPS):
        optimizer.zero_grad()
        net(t, world.rank).backward()
        optimizer.step()
        history.append(net.w.detach().clone())
    return history


@pytest.mark.threads(unless={"P": 2, "K": 2})
@pytest.mark.parametrize(("P", "K"), [(2, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize("select", [PerBlock(), PerBlock(5), AcrossShards(4)], ids=repr)
def test_dense_and_whole_it_is_diloco_to_the_bit(run, P: int, K: int, select: Any) -> None:
    """The values are multiples of powers of two, where float32 sums are exact in any order.

    β has no effect, because error feedback keeps nothing.
    """
    outer = lambda params: optim.SGD(params, lr=0.5)  # noqa: E731
    dense = run(P * K, lambda w: on_a_grid(w, P, diloco(EVERY, outer), torch.float32))
    ours = lambda: sparseloco(EVERY, density=1, bits=32, lr=0.5, selection=select)  # noqa: E731
    found = run(P * K, lambda w: on_a_grid(w, P, ours(), torch.float32))
    for mine, theirs in zip(found, dense, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert not torch.equal(dense[0][0], dense[0][-1])


@pytest.mark.parametrize(("P", "K"), [(3, 1), (2, 2)])
def test_dense_and_whole_it_is_diloco_but_for_rounding(run, P: int, K: int) -> None:
    def trained(world: Communicator, method: Method) -> list[Tensor]:
        topology, net = form(world, P), model(dtype=torch.float32)
        optimizer = hpcsgd.DistributedOptimizer(optim.AdamW(net.parameters(), lr=0.01), net, topology, method)
        history = []
        for t in range(STEPS):
            optimizer.zero_grad()
            loss(net, *batch(t, world.rank, torch.float32)).backward()
            optimizer.step()
            history.append(vector(net))
        return history

    outer = lambda params: optim.SGD(params, lr=0.7)  # noqa: E731
    dense = run(P * K, lambda w: trained(w, diloco(EVERY, outer)))
    found = run(P * K, lambda w: trained(w, sparseloco(EVERY, density=1, bits=32, lr=0.7)))
    for mine, theirs in zip(found, dense, strict=True):
        torch.testing.assert_close(mine[-1], theirs[-1], rtol=0, atol=1e-5)


@pytest.mark.threads(unless={"P": 2, "bits": 2})
@pytest.mark.parametrize("bits", VALUES)
@pytest.mark.parametrize(("P", "K"), [(3, 1), (3, 2), (2, 2), (2, 3)])
def test_several_synchronizations_in_numpy(run, P: int, K: int, bits: int) -> None:
    """The 67 elements are divisible neither by K nor into blocks of 11."""
    make = OPTIMIZERS["AdamW"]
    for select, other in (
        (PerBlock(11), per_run(11, 0.25, K)),
        (AcrossShards(11), over_positions(11, 0.25, K)),
    ):
        ours = lambda: sparseloco(EVERY, 0.25, bits, beta=0.5, lr=0.5, selection=select)  # noqa: B023, E731
        ranks = run(P * K, lambda w: distributed(w, P, ours(), make, STEPS))  # noqa: B023
        same(ranks, alone(P, K, make, STEPS, sparse_synchronizations(EVERY, K, other, bits, 0.5, 0.5)), K)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("wrapped", [lambda m: delayed(m, 2), lambda m: streaming(m, 2, 2, update_alpha=0.0)])
def test_synchronizations_may_be_late(run, wrapped: Any) -> None:
    """All groups end with the same model, which has moved from the initial one."""

    def ends(world: Communicator) -> tuple[Tensor, Tensor]:
        topology, net = form(world, 2), model()
        method = wrapped(sparseloco(4, density=0.25, selection=AcrossShards(5)))
        optimizer = hpcsgd.DistributedOptimizer(optim.SGD(net.parameters(), lr=0.1), net, topology, method)
        start = vector(net)
        for t in range(10):
            optimizer.zero_grad()
            loss(net, *batch(t, world.rank)).backward()
            optimizer.step()
        with optimizer.averaged_model():
            return start, vector(net)

    found = run(4, ends)
    assert all(torch.equal(end, found[0][1]) for _, end in found)
    assert (found[0][1] - found[0][0]).norm() > 0.01


@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_little_is_not_lost_in_16_bits(run, dtype: torch.dtype) -> None:
    """θ and e have more bits: changes smaller than an ulp of the parameters add up and finally move them."""

    def ends(world: Communicator) -> tuple[Tensor, Tensor, list[torch.dtype]]:
        topology, net = form(world, 2), nn.Linear(8, 2, bias=False).to(dtype)
        with torch.no_grad():
            net.weight.fill_(1.0)
        method = sparseloco(1, density=1, bits=32, lr=1 / 64)
        optimizer = hpcsgd.DistributedOptimizer(optim.SGD(net.parameters(), lr=1.0), net, topology, method)
        for _ in range(64):
            net.weight.grad = torch.full_like(net.weight, 2**-6)
            optimizer.step()
        shards = method.state_dict()["averager.inner"].sharded
        return net.weight.detach().float(), shards["theta"][0], [x[0].dtype for x in shards.values()]

    for w, theta, dtypes in run(4, ends):
        assert dtypes == [torch.float32] * 2
        torch.testing.assert_close(theta, torch.full_like(theta, 1 - 2**-6), rtol=0, atol=2**-10)
        torch.testing.assert_close(w, torch.full_like(w, 1 - 2**-6), rtol=0, atol=2**-8)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("bits", VALUES)
def test_what_is_not_a_number_reaches_everybody(run, bits: int, bad: float) -> None:
    def ends(world: Communicator) -> Tensor:
        topology, net = form(world, 2), model()
        method = sparseloco(1, density=0.05, bits=bits)
        optimizer = hpcsgd.DistributedOptimizer(optim.SGD(net.parameters(), lr=0.1), net, topology, method)
        for t in range(2):
            optimizer.zero_grad()
            loss(net, *batch(t, world.rank)).backward()
            if world.rank == 1:
                next(p.grad for p in net.parameters() if p.grad is not None).view(-1)[3] = bad
            optimizer.step()
        return vector(net)

    assert all(not w.isfinite().all() for w in run(2, ends))


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("n", "bits", "nbytes"), [(4096, 2, 84), (8192, 2, 168), (4096, 32, 320)])
def test_bytes_of_a_synchronization(run, n: int, bits: int, nbytes: int) -> None:
    """64 of 4096 elements are sent: 64 bytes of indices, 16 of values and 4 of sizes per shard of `n`."""

    def one(world: Communicator) -> tuple[float, float]:
        topology, net = form(world, 2), nn.Linear(2 * n, 1, bias=False)
        method = sparseloco(1, bits=bits)
        optimizer = hpcsgd.DistributedOptimizer(optim.SGD(net.parameters(), lr=0.1), net, topology, method)
        net(torch.randn(1, 2 * n)).sum().backward()
        before = world.stats.totals()
        optimizer.step()
        m = ModelLayout.of(net.named_parameters(), 2, 2, 25e6)
        told = next(x.nbytes for x in method.averager.inner.comm_ops(m))  # type: ignore[attr-defined]
        return world.stats.since(before)["model_average"].bytes, told

    assert run(4, one) == [(nbytes, 2 * nbytes)] * 4


@pytest.mark.ranks(4)
def test_positions_where_more_has_gathered_send_more(run) -> None:
    """If one shard has changes a hundred times as large, nearly all k elements are selected there."""

    def one(world: Communicator, select: Any) -> Tensor:
        """Return how many elements of each shard have changed."""
        topology, net = form(world, 2), nn.Linear(400, 1, bias=False, dtype=torch.float64)
        method = sparseloco(1, density=0.1, bits=32, selection=select)
        optimizer = hpcsgd.DistributedOptimizer(optim.SGD(net.parameters(), lr=1.0), net, topology, method)
        before = net.weight.detach().clone()
        chance = torch.Generator().manual_seed(1)
        far = torch.tensor([100.0] * 200 + [1.0] * 200)
        net.weight.grad = torch.randn(400, generator=chance, dtype=torch.float64).mul_(far).view(1, 400)
        optimizer.step()
        return (net.weight.detach() - before).view(2, 200).count_nonzero(1)

    assert run(4, one, PerBlock(200))[0].tolist() == [20, 20]
    assert run(4, one, AcrossShards(50))[0].tolist() in ([40, 0], [39, 1])


@pytest.mark.parametrize(("P", "K"), [(2, 2), (3, 1)])
def test_what_is_kept_is_what_was_not_said(run, P: int, K: int) -> None:
    """Without decay all changes are in θ or still in e: mean e = θ − the plain mean of the changes."""

    def one(world: Communicator) -> tuple[np.ndarray, np.ndarray]:
        topology, net = form(world, P), OnAGrid(torch.float64)
        method = sparseloco(1, density=0.2, beta=1.0)
        optimizer = hpcsgd.DistributedOptimizer(optim.SGD(net.parameters(), lr=0.125), net, topology, method)
        (bucket,) = optimizer.buckets
        moved = torch.zeros_like(bucket.param_shard)
        start = bucket.param_shard.clone()
        for t in range(6):
            optimizer.zero_grad()
            net(t, world.rank).backward()
            before = bucket.param_shard.clone()
            for p in net.parameters():
                assert p.grad is not None
            optimizer.step()
            moved += bucket.param_shard - before  # the change that all groups sent
        e = method.state_dict()["averager.inner"].sharded["error"][0].clone()
        wanted = torch.zeros_like(e)
        for t in range(6):
            grads = []
            for rank in range(P * K):
                twin = OnAGrid(torch.float64)
                twin(t, rank).backward()
                assert twin.w.grad is not None
                whole = torch.zeros(bucket.w.numel(), dtype=torch.float64)
                whole[: twin.w.numel()] = twin.w.grad
                grads.append(whole)
            wanted -= 0.125 * torch.stack(grads).mean(0).view(K, -1)[topology.shard_index]
        topology.inter_group.allreduce(e, "mean").wait()
        assert e.abs().max() > 0
        return (bucket.param_shard - start - e).numpy(), wanted.numpy()

    for found, wanted in run(P * K, one):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("norms", "factors"),
    [
        ([1.0, 2.0, 200.0], [1.0, 1.0, 0.01]),
        ([1.0, 4.0], [1.0, 0.25]),
        ([0.0, 1.0, 2.0], [1.0, 1.0, 0.5]),
        ([1.0, math.nan, 2.0, math.inf, 4.0], [1.0, 0.0, 1.0, 0.0, 0.5]),
        ([0.0, 0.0], [1.0, 1.0]),
        ([math.nan], [0.0]),
    ],
)
def test_norms_are_limited_to_the_lower_median(norms: list[float], factors: list[float]) -> None:
    assert MedianNorm().factors(norms) == factors


@pytest.mark.parametrize(
    ("sent", "over_groups", "over_senders"),
    [
        ([[0, 2], [1, 3]], [0.5, 1.0, 1.5, 2.0], [1.0, 2.0, 3.0, 4.0]),
        ([[0, 2], [0, 2]], [0.5, 1.0, 1.5, 2.0], [0.5, 2.0, 1.5, 4.0]),
        ([], [1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]),
    ],
)
def test_an_element_is_divided_by_those_that_sent_it(
    sent: list[list[int]], over_groups: list[float], over_senders: list[float]
) -> None:
    for mean, expected in ((OverGroups(), over_groups), (OverSenders(), over_senders)):
        total = torch.tensor([1.0, 2.0, 3.0, 4.0])
        mean.divide(total, [torch.tensor(places) for places in sent])
        assert total.tolist() == expected


@pytest.mark.ranks(4)
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e6])
def test_a_group_that_breaks_down_moves_nobody_far(run, bad: float) -> None:
    """Only one shard of the second group has a bad value, but both of its ranks limit what they send."""

    def ends(world: Communicator) -> tuple[float, float, Tensor]:
        topology, net = form(world, 2), model(dtype=torch.float32)
        method = sparseloco(1, density=0.25, mean=OverSenders(), clip=MedianNorm())
        optimizer = hpcsgd.DistributedOptimizer(optim.SGD(net.parameters(), lr=0.1), net, topology, method)
        start = vector(net)
        for t in range(2):
            optimizer.zero_grad()
            loss(net, *batch(t, world.rank % 2, torch.float32)).backward()
            if world.rank >= 2 and t == 0:
                first = next(net.parameters())
                assert first.grad is not None
                first.grad.view(-1)[0] = bad
            optimizer.step()
            if t == 0:
                factor = optimizer.metrics["clip_factor"]
        return factor, optimizer.metrics["clip_factor"], vector(net) - start

    found = run(4, ends)
    assert all(torch.equal(moved, found[0][2]) for *_, moved in found)
    assert 0 < found[0][2].norm() < 1
    assert [first for first, _, _ in found[:2]] == [1.0] * 2
    first = 0.0 if not math.isfinite(bad) else pytest.approx(0.0, abs=1e-4)
    assert [factor for factor, _, _ in found[2:]] == [first] * 2
    assert math.isfinite(bad) or [then for _, then, _ in found[2:]] == [1.0] * 2
