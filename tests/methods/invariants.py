"""What holds for a method whoever is fast or slow, where nothing can say what a training comes to."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, optim

import hpcsgd
from hpcsgd.comm import Communicator
from hpcsgd.core.topology import Topology, form
from hpcsgd.engine.optimizer import DistributedOptimizer
from hpcsgd.methods import Method
from references import model, vector

STEPS = 8

NewMethod = Callable[[], Method]
Invariant = Callable[[Callable[..., list[Any]], NewMethod, int, int], None]
"""Raises AssertionError where it does not hold on P × K ranks; given the fixture `run`."""


class Tally(nn.Module):
    """One cell for every step of every group: which updates has somebody seen?"""

    def __init__(self, P: int, steps: int) -> None:
        super().__init__()
        self.cells = nn.Parameter(torch.zeros(P, steps))

    def mark(self, g: int, t: int) -> None:
        """This step's gradient is −P in one cell, so that the update, times 1/P, adds 1."""
        self.cells.grad = torch.zeros_like(self.cells)
        self.cells.grad[g, t] = -len(self.cells)


def tallying(topology: Topology, method: Method, steps: int) -> tuple[Tally, DistributedOptimizer]:
    net = Tally(topology.num_groups, steps)
    inner = optim.SGD(net.parameters(), lr=1.0)
    return net, hpcsgd.DistributedOptimizer(inner, net, topology, method, overlap_grad_reduce=False)


class Tallied(NamedTuple):
    """What one rank saw."""

    before_each_step: Tensor
    """And after the last one."""
    ahead: list[float]
    """By how many steps this group was ahead of the slowest, as noted after each."""
    at_last: Tensor
    """What is in the model of all."""


def tallied(world: Communicator, new: NewMethod, P: int) -> Tallied:
    """Groups at a pace of their own, the last one slow; positions of a group do the same."""
    topology = form(world, groups=P)
    net, optimizer = tallying(topology, new(), STEPS)
    pace = random.Random(topology.group_index)
    seen, ahead = [], []
    for t in range(STEPS):
        seen.append(net.cells.detach().clone())
        time.sleep(pace.choice([0, 0, 0.001, 0.005]) if topology.group_index < P - 1 else 0.01)
        net.mark(topology.group_index, t)
        optimizer.step()
        ahead.append(optimizer.metrics.get("ahead", 0))
    seen.append(net.cells.detach().clone())
    with optimizer.averaged_model():
        return Tallied(torch.stack(seen), ahead, net.cells.detach().clone())


def every_update_counts_once(run: Callable[..., list[Any]], new: NewMethod, P: int, K: int) -> None:
    """None is lost and none counts twice, however late it came."""
    for rank in run(P * K, tallied, new, P):
        torch.testing.assert_close(rank.at_last, torch.ones(P, STEPS), rtol=0, atol=1e-5)


def reads_within(s: int) -> Invariant:
    """At clock c a group has all of clocks ≤ c − s − 1, whatever of the later ones, and all of its own; none
    is more than s steps ahead of the slowest."""

    def invariant(run: Callable[..., list[Any]], new: NewMethod, P: int, K: int) -> None:
        for rank, (seen, ahead, _) in enumerate(run(P * K, tallied, new, P)):
            for c, cells in enumerate(seen):
                assert cells[:, : max(c - s, 0)].eq(1).all()
                assert cells[rank // K, :c].eq(1).all()
                assert cells.eq(0).logical_or(cells.eq(1)).all()
            assert max(ahead) <= s

    invariant.__name__ = f"reads_within_{s}"
    return invariant


def meeting(world: Communicator, new: NewMethod, P: int, steps: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """From starting points of their own, with gradients of zero: of this group before and after, of all
    before and after."""
    topology, net = form(world, groups=P), model()
    inner = optim.SGD(net.parameters(), lr=0.1)
    optimizer = hpcsgd.DistributedOptimizer(inner, net, topology, new(), overlap_grad_reduce=False)
    chance = torch.Generator().manual_seed(topology.group_index)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=chance, dtype=p.dtype, device="cpu"))
    start = vector(net)
    mean = start.clone()
    topology.inter_group.allreduce(mean, "mean").wait()
    for _ in range(steps):
        for p in net.parameters():
            p.grad = torch.zeros_like(p)
        time.sleep(0.001 * (topology.group_index % 3))
        optimizer.step(loss=1.0)
    end = vector(net)
    with optimizer.averaged_model():
        return start, end, mean, vector(net)


def the_mean_is_kept(run: Callable[..., list[Any]], new: NewMethod, P: int, K: int) -> None:
    """Meetings move groups, and not their mean. Not all of them: one may be through before any other asks."""
    ranks = run(P * K, meeting, new, P, 12)
    for _, _, before, after in ranks:
        torch.testing.assert_close(after, before, rtol=0, atol=1e-12)
    if P > 1:
        assert any(not torch.equal(start, end) for start, end, _, _ in ranks)
