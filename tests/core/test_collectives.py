"""Tests of a script's `allreduce`, `broadcast` and `barrier`, also while gradients are being reduced."""

from __future__ import annotations

import math
import re
from typing import Any, cast

import pytest
import torch
from torch import nn, optim

import hpcsgd
from hpcsgd.comm import Communicator
from hpcsgd.core.topology import form
from hpcsgd.errors import UserError

N = 4


def reduced(world: Communicator, xs: list[Any], op: str) -> Any:
    return hpcsgd.allreduce(xs[world.rank], form(world), op=op)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("xs", "op", "expected"),
    [
        ([1, 2, 6, 3], "sum", 12),
        ([1, 2, 6, 3], "max", 6),
        ([1, 2, 6, 3], "mean", 3.0),
        ([1, 2.5, 6, 0], "sum", 9.5),
        ([0.5, 2.5, -6.0, 0.0], "max", 2.5),
        ([True, False, True, False], "sum", 2),
        ([2**60, 1, 1, 0], "sum", 2**60 + 2),
        ([math.inf, 1.0, -math.inf, 0.0], "sum", math.nan),
        ([math.nan, 1.0, 2.0, 0.0], "max", math.nan),
    ],
)
@pytest.mark.ranks(N)
def test_numbers(run, xs: list[Any], op: str, expected: float) -> None:
    found = run(N, reduced, xs, op)
    assert found == [pytest.approx(expected, nan_ok=True, rel=1e-15)] * N
    assert {type(x) for x in found} == {type(expected)}


def of_tensors(world: Communicator, dtype: torch.dtype, op: str, strided: bool) -> tuple[Any, Any, bool]:
    x = torch.arange(12, dtype=dtype).reshape(3, 4) * (world.rank + 1)
    x = x.T if strided else x
    before = x.clone()
    found = hpcsgd.allreduce(x, form(world), op=op)  # pyright: ignore[reportArgumentType]
    return found, x.equal(before), found.dtype == dtype


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize(("dtype", "op"), [
    (torch.float32, "mean"), (torch.float64, "sum"), (torch.bfloat16, "mean"), (torch.int64, "sum"),
    (torch.int64, "max"),
])  # fmt: skip
@pytest.mark.ranks(N)
def test_tensors(run, dtype: torch.dtype, op: str, strided: bool) -> None:
    factor = {"mean": 2.5, "sum": 10, "max": 4}[op]
    expected = (torch.arange(12).reshape(3, 4) * factor).to(dtype)
    for found, unchanged, same_dtype in run(N, of_tensors, dtype, op, strided):
        assert found.equal(expected.T if strided else expected)
        assert unchanged
        assert same_dtype


def of_loss(world: Communicator) -> tuple[bool, bool, float]:
    loss = (torch.full((2,), float(world.rank), requires_grad=True) * 3).sum()
    found = hpcsgd.allreduce(loss, form(world))
    return isinstance(found, torch.Tensor), found.requires_grad, found.item()


@pytest.mark.ranks(N)
def test_a_loss_with_a_graph(run) -> None:
    assert run(N, of_loss) == [(True, False, 9.0)] * N


def sent_from(world: Communicator, root: int) -> tuple[Any, torch.Tensor]:
    topology = form(world)
    words = hpcsgd.broadcast({"rank": world.rank} if world.rank == root else None, topology, root)
    return words, hpcsgd.broadcast(torch.full((2, 2), float(world.rank)).T, topology, root)


@pytest.mark.parametrize("root", [0, 2])
@pytest.mark.ranks(N)
def test_a_broadcast(run, root: int) -> None:
    for words, x in run(N, sent_from, root):
        assert words == {"rank": root}
        assert x.equal(torch.full((2, 2), float(root)))


@pytest.mark.ranks(N)
def test_a_barrier_holds_all_until_the_last(run) -> None:
    assert run(N, behind_a_barrier) == [None] * N


def behind_a_barrier(world: Communicator) -> None:
    hpcsgd.barrier(form(world))


class Branches(nn.Module):
    """A model of which each rank uses another half, so that backward does not reduce all buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.halves[which](x)


def between_backward_and_step(world: Communicator) -> list[float]:
    torch.manual_seed(1)
    topology, net = form(world), Branches()
    optimizer = hpcsgd.DistributedOptimizer(
        optim.SGD(net.parameters(), lr=0.1), net, topology, hpcsgd.bsp(), bucket_cap_mb=1e-5
    )
    means = []
    for t in range(3):
        loss = net(torch.ones(2, 4), (world.rank + t) % 2).square().mean()
        loss.backward()
        means.append(hpcsgd.allreduce(loss.item(), topology))
        optimizer.step()
        optimizer.zero_grad()
    return means


@pytest.mark.ranks(2)
def test_a_metric_between_backward_and_step_touches_no_gradient(run) -> None:
    """Ranks reduce different buckets then, so on the optimizer's communication thread this would deadlock."""
    first, *others = run(2, between_backward_and_step)
    assert len(first) == 3
    assert others == [first]


def refused(world: Communicator, call: str) -> str:
    topology, x = form(world), torch.ones(2 + world.rank)
    calls = {
        "op": lambda: hpcsgd.allreduce(1.0, topology, op="avg"),  # pyright: ignore[reportArgumentType]
        "kind": lambda: hpcsgd.allreduce("1", topology),  # pyright: ignore[reportArgumentType]
        "integers": lambda: hpcsgd.allreduce(torch.ones(2, dtype=torch.int64), topology),
        "shapes": lambda: hpcsgd.allreduce(x, topology),
        "operations": lambda: hpcsgd.allreduce(1, topology, op="sum" if world.rank else "max"),
        "number and tensor": lambda: hpcsgd.allreduce(cast(Any, x if world.rank else 1.0), topology),
        "calls": lambda: hpcsgd.allreduce(1, topology) if world.rank else hpcsgd.broadcast(1, topology),
        "root": lambda: hpcsgd.broadcast(1, topology, root=2),
    }
    with pytest.raises(UserError) as error:
        calls[call]()
    return str(error.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("op", "op = 'avg': expected 'sum' or 'mean' or 'max'"),
        ("kind", "allreduce: x = '1': expected a number or a tensor"),
        ("integers", "allreduce: mean of x: torch.int64 cannot be reduced; allowed: bfloat16, float16,"),
        ("shapes", "rank 0 gives a tensor (2,) of torch.float32, and rank 1 calls allreduce, mean with a"),
        ("operations", "max: rank 0 gives no tensor, and rank 1 calls allreduce, sum with no tensor: make"),
        ("number and tensor", "rank 0 gives no tensor, and rank 1 calls allreduce, mean with a tensor (3,)"),
        ("calls", "broadcast from 0: rank 0 gives no tensor, and rank 1 calls allreduce, mean"),
        ("root", "root = 2: the ranks are 0 to 1"),
    ],
)  # fmt: skip
@pytest.mark.ranks(2)
def test_refusals(run, call: str, message: str) -> None:
    for found in run(2, refused, call):
        assert re.search(re.escape(message), found), found
