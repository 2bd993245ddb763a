"""SparseLoCo leaves padding in shards and weights without a change as they are."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import hpcsgd
from hpcsgd.comm import Communicator
from hpcsgd.core.averager import run_averager
from hpcsgd.core.flat import flatten
from hpcsgd.core.step import StepContext, TrainingContext
from hpcsgd.core.topology import Topology, form
from hpcsgd.methods import Method, sparseloco, streaming
from hpcsgd.parts.averagers import AcrossShards, PerBlock

EVERY, STEPS = 2, 12
WAYS: dict[str, Any] = {
    "all in 2 bits": lambda: sparseloco(EVERY, density=1.0),
    "a part in 2 bits": lambda: sparseloco(EVERY, density=0.3, selection=PerBlock(11)),
    "over positions": lambda: sparseloco(EVERY, density=0.3, selection=AcrossShards(11)),
    "in 4 bits": lambda: sparseloco(EVERY, density=1.0, bits=4),
}


class Weights(nn.Module):
    """A model of `n` weights. The first `used` are pulled to a goal that depends on rank and step."""

    def __init__(self, n: int, used: int | None = None) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
        self._used = n if used is None else used

    def forward(self, t: int, rank: int) -> Tensor:
        chance = torch.Generator().manual_seed(100 * t + rank)
        goal = torch.randn(self.w.shape, generator=chance, dtype=torch.float64)
        return ((self.w - goal)[: self._used] ** 2).sum() / 2


def wrapped(net: nn.Module, topology: Topology, method: Method) -> hpcsgd.DistributedOptimizer:
    return hpcsgd.DistributedOptimizer(optim.SGD(net.parameters(), lr=0.1), net, topology, method)


def train(net: Weights, optimizer: hpcsgd.DistributedOptimizer, steps: range) -> None:
    for t in steps:
        optimizer.zero_grad()
        net(t, optimizer.topology.rank).backward()
        optimizer.step()


@pytest.mark.threads(unless={"way": "a part in 2 bits"})
@pytest.mark.ranks(4)
@pytest.mark.parametrize("way", WAYS)
def test_padding_is_never_sent(run, way: str) -> None:
    """67 weights in two shards leave one element of padding in the last one, which stays 0.

    Therefore a resumed run, whose padding is new, has the same result.
    """

    def one(world: Communicator) -> tuple[Tensor, Tensor]:
        topology, net, method = form(world, 2), Weights(67), WAYS[way]()
        optimizer = wrapped(net, topology, method)
        train(net, optimizer, range(STEPS // 2))
        saved, w = copy.deepcopy(optimizer.state_dict()), net.w.detach().clone()
        train(net, optimizer, range(STEPS // 2, STEPS))
        (bucket,) = optimizer.buckets
        behind = [bucket.w[67:]]
        if topology.shard_index == 1:
            shards = method.state_dict()["averager.inner"].sharded
            behind += [x[33:] for vectors in shards.values() for x in vectors]
        assert all(x.numel() == 1 and not x.any() for x in behind)
        again = Weights(67)
        resumed = wrapped(again, topology, WAYS[way]())
        with torch.no_grad():
            again.w.copy_(w)
        resumed.load_state_dict(saved)
        train(again, resumed, range(STEPS // 2, STEPS))
        return net.w.detach().clone(), again.w.detach().clone()

    for whole, resumed in run(4, one):
        assert torch.equal(whole, resumed)


@pytest.mark.ranks(4)
def test_padding_costs_no_bytes_and_no_choice(run) -> None:
    """Of 5 weights the first rank of a group owns three, the second one two."""

    def one(world: Communicator) -> float:
        net = Weights(5)
        optimizer = wrapped(net, form(world, 2), sparseloco(1, density=1.0, bits=32))
        before = world.stats.totals()
        train(net, optimizer, range(1))
        return world.stats.since(before)["model_average"].bytes

    first, second, *others = run(4, one)
    assert others == [first, second]
    assert first - second == 4


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bits", [2, 4, 32])
@pytest.mark.parametrize(
    "wrap", [lambda method: method, lambda method: streaming(method, 1, 1, update_alpha=0.0)]
)
def test_a_weight_with_nothing_to_send_stays(run, bits: int, wrap: Any) -> None:
    """More elements are selected than have changed: few in a block of 10, or none, have a gradient."""

    def one(world: Communicator) -> Tensor:
        net = Weights(40, used=13)
        method = wrap(sparseloco(EVERY, density=0.5, bits=bits, selection=PerBlock(10)))
        optimizer = wrapped(net, form(world, 2), method)
        start = net.w.detach().clone()
        train(net, optimizer, range(9))
        return net.w.detach() - start

    for moved in run(2, one):
        assert moved[:13].all()
        assert not moved[13:].any()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("select", [PerBlock(2), AcrossShards(2)], ids=repr)
def test_padding_between_parameters(run, select: Any) -> None:
    """This is the layout of FSDP models. Elements in the gaps are neither sent nor changed."""

    def one(world: Communicator) -> list[float]:
        own = torch.zeros(9)
        own[3:5] = 7
        bucket = SimpleNamespace(param_shard=own, filled=[slice(0, 3), slice(5, 9)])
        s = StepContext(TrainingContext(form(world, 2), [bucket], optimizer_state=None), t=1)  # type: ignore[arg-type, list-item]
        how = sparseloco(1, density=1.0, bits=32, selection=select).averager.inner  # type: ignore[attr-defined]
        how.prepare([own], s)
        own += torch.arange(9) * (1 + world.rank)
        run_averager(how, [own], s)
        return own.tolist()

    expected = [0.0, 1.5, 3.0, 10.0, 11.0, 7.5, 9.0, 10.5, 12.0]
    assert run(2, one) == [expected, [*expected[:3], 13.0, 15.0, *expected[5:]]]


def test_where_there_is_no_padding() -> None:
    """Tensors that are not cut leave the end of a shard unfilled."""
    named = [(f"p{i}", nn.Parameter(torch.ones(n))) for i, n in enumerate((5, 3, 3))]
    whole = {param for _, param in named}
    for j, expected in enumerate(([slice(0, 5)], [slice(0, 6)])):
        (bucket,) = flatten(named, 2, j, 1e9, whole)
        assert bucket.filled == expected
        assert sum(part.stop - part.start for part in bucket.filled) == int(bucket.param_shard.sum())
