"""Quantized averages: all groups get the same bits, and later averages send what rounding left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, optim

import hpcsgd
from hpcsgd.comm import Communicator
from hpcsgd.core.topology import form
from hpcsgd.methods import Method, diloco, hierarchical
from hpcsgd.parts import quantizers
from hpcsgd.parts.averagers import QuantizedMean
from hpcsgd.parts.quantizers.base import Quantizer
from hpcsgd.parts.schedules import never
from references import batch, loss, model, vector

EVERY = 2
QUANTIZERS: dict[str, Quantizer] = {
    "bf16": quantizers.bf16(),
    "int8": quantizers.int8(block=8),
    "int4": quantizers.int4(block=8),
    "int2": quantizers.int2(block=8),
    "dice": quantizers.int4(block=8, rounding=quantizers.Stochastic()),
}
MAKERS: dict[str, Callable[[Quantizer | None], Method]] = {
    "hierarchical": lambda wire: hierarchical(EVERY, quantize=wire),
    "diloco": lambda wire: diloco(EVERY, quantize=wire),
    "averaged moments": lambda wire: hierarchical(EVERY, optimizer_state=hpcsgd.AverageState, quantize=wire),
}


def trained(world: Communicator, P: int, method: Method, dtype: torch.dtype, steps: int = 8) -> list[Tensor]:
    net, topology = model(dtype=dtype), form(world, P)
    optimizer = hpcsgd.DistributedOptimizer(
        optim.SGD(net.parameters(), lr=0.1, momentum=0.9), net, topology, method, bucket_cap_mb=1e-4
    )
    history = []
    for t in range(steps):
        optimizer.zero_grad()
        loss(net, *batch(t, world.rank, dtype)).backward()
        optimizer.step()
        history.append(vector(net))
    return history


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("P", "K"), [(3, 1), (2, 2)])
@pytest.mark.parametrize("method", MAKERS)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_all_groups_leave_with_the_same_bits(
    run, name: str, method: str, P: int, K: int, dtype: torch.dtype
) -> None:
    """This holds with an outer optimizer, too, and the results are close to those without quantization."""
    found = run(P * K, lambda world: trained(world, P, MAKERS[method](QUANTIZERS[name]), dtype))
    plain = run(P * K, lambda world: trained(world, P, MAKERS[method](None), dtype))
    for t in range(EVERY - 1, len(found[0]), EVERY):
        assert all(torch.equal(each[t], found[0][t]) for each in found)
    room = 0.15 if name in ("int4", "int2", "dice") else 0.02
    if dtype == torch.float32:
        torch.testing.assert_close(found[0][-1], plain[0][-1], rtol=0, atol=room)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("late", [False, True])
def test_groups_that_have_trained_separately_synchronize_as_they_are(run, late: bool) -> None:
    """Groups that synchronize from the beginning of a training have a common model."""

    def one(world: Communicator, wire: Quantizer | None) -> tuple[Tensor, float]:
        before = world.stats.totals()
        method = hierarchical(EVERY, quantize=wire)
        if late:
            method = hpcsgd.switch(hierarchical(99), method, at=1)
        end = trained(world, 3, method, torch.float32, EVERY)[-1]
        assert "model_average" not in before
        return end, world.stats.totals()["model_average"].bytes

    found, plain = (run(3, one, wire) for wire in (quantizers.int4(), None))
    for (mine, few), (theirs, many) in zip(found, plain, strict=True):
        assert torch.equal(mine, theirs) == late
        assert (few < 0.5 * many) == (not late)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("wire", ["int4", "int2"])
def test_what_was_said_and_what_is_kept_is_how_groups_moved(run, wire: str) -> None:
    """At every synchronization, θ + mean of e equals the result of plain means."""

    def one(world: Communicator) -> list[tuple[Tensor, Tensor, Tensor]]:
        topology = form(world, 3)
        net = model(dtype=torch.float64)
        how = QuantizedMean(QUANTIZERS[wire])
        method = Method(hpcsgd.AllToAll(), never, how)
        optimizer = hpcsgd.DistributedOptimizer(optim.SGD(net.parameters(), lr=0.1), net, topology, method)
        generator, found = torch.Generator().manual_seed(world.rank), []
        (bucket,) = optimizer.buckets
        for _ in range(6):
            moved = torch.randn(bucket.param_shard.numel(), generator=generator, dtype=torch.float64)
            bucket.param_shard.add_(moved)
            optimizer.average_models()
            kept = how.state_dict().sharded["kept"][0].clone()
            found.append((moved, bucket.param_shard.clone(), kept))
        return found

    ranks = run(3, one)
    exact = ranks[0][0][1]
    for number in range(1, 6):
        exact = exact + torch.stack([rank[number][0] for rank in ranks]).mean(0)
        kept = torch.stack([rank[number][2] for rank in ranks]).mean(0)
        assert kept.abs().max() > 0
        torch.testing.assert_close(ranks[0][number][1] + kept, exact, rtol=0, atol=1e-12)


@pytest.mark.ranks(2)
def test_an_outer_optimizer_does_not_have_to_be_announced(run) -> None:
    """Groups that did not move send zeros, however far the outer optimizer moved the model."""

    class Silent:
        """A quantizer that records what it was given."""

        keeps = False

        def __init__(self) -> None:
            self.said: list[Tensor] = []

        def nbytes(self, n: int) -> int:
            return 4 * n

        def encode(self, x: Tensor, code: Tensor, dice: int) -> None:
            self.said.append(x.clone())
            code.view(torch.float32).copy_(x)

        def decode(self, code: Tensor, out: Tensor) -> None:
            out.copy_(code.view(torch.float32))

    def one(world: Communicator) -> list[list[Tensor]]:
        """Return the vectors that were sent in each step."""
        topology, net, wire = form(world, 2), model(dtype=torch.float32), Silent()
        method = diloco(1, outer=lambda params: optim.SGD(params, lr=0.7, momentum=0.9), quantize=wire)
        optimizer = hpcsgd.DistributedOptimizer(optim.SGD(net.parameters(), lr=0.1), net, topology, method)
        steps: list[list[Tensor]] = []
        for t in range(3):
            if t == 2:
                for group in optimizer.param_groups:
                    group["lr"] = 0.0
            wire.said = []
            optimizer.zero_grad()
            loss(net, *batch(t, world.rank, torch.float32)).backward()
            optimizer.step()
            steps.append(wire.said)
        return steps

    for first, moving, still in run(2, one):
        assert min(max(x.abs().max() for x in said) for said in (first, moving)) > 0
        assert still
        assert all(x.abs().max() < 1e-6 for x in still)


@pytest.mark.ranks(2)
def test_the_distance_is_to_what_groups_end_with(run) -> None:
    def one(world: Communicator) -> tuple[float, float]:
        topology, net = form(world, 2), model(dtype=torch.float64)
        method = hierarchical(1, quantize=quantizers.int4(block=8))
        optimizer = hpcsgd.DistributedOptimizer(optim.SGD(net.parameters(), lr=0.5), net, topology, method)
        for t in range(3):
            optimizer.zero_grad()
            loss(net, *batch(t, world.rank)).backward()
            gradients: Any = [p.grad for p in net.parameters()]
            brought = vector(net) - 0.5 * torch.cat([g.reshape(-1) for g in gradients])
            optimizer.step()
        return (brought - vector(net)).norm().item(), optimizer.metrics["distance"]

    found = run(2, one)
    D = sum(mine for mine, _ in found) / 2
    assert all(noted == pytest.approx(D, rel=1e-9) for _, noted in found)
