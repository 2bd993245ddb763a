"""Invariants of methods whose result depends on the speed of ranks, so that no reference can predict it."""

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
"""A check on P × K ranks, which gets the fixture `run` and raises AssertionError if the invariant fails."""


class Tally(nn.Module):
    """A model with one cell for every step of every group, which shows which updates are in it."""

    def __init__(self, P: int, steps: int) -> None:
        super().__init__()
        self.cells = nn.Parameter(torch.zeros(P, steps))

    def mark(self, g: int, t: int) -> None:
        """Set a gradient of −P in the cell of this step, so that the update, times 1/P, adds 1 there."""
        self.cells.grad = torch.zeros_like(self.cells)
        self.cells.grad[g, t] = -len(self.cells)


def tallying(topology: Topology, method: Method, steps: int) -> tuple[Tally, DistributedOptimizer]:
    net = Tally(topology.num_groups, steps)
    inner = optim.SGD(net.parameters(), lr=1.0)
    return net, hpcsgd.DistributedOptimizer(inner, net, topology, method, overlap_grad_reduce=False)


class Tallied(NamedTuple):
    """The models that one rank read."""

    before_each_step: Tensor
    """The model before each step and after the last one."""
    ahead: list[float]
    """The recorded number of steps by which this group was ahead of the slowest, after each step."""
    at_last: Tensor
    """The averaged model at the end."""


def tallied(world: Communicator, new: NewMethod, P: int) -> Tallied:
    """Train groups that wait random times between steps, except the last, which waits long each time.

    The ranks of a group wait equally long.
    """
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
    """Check that every update is in the final model exactly once, however late it was sent."""
    for rank in run(P * K, tallied, new, P):
        torch.testing.assert_close(rank.at_last, torch.ones(P, STEPS), rtol=0, atol=1e-5)


def reads_within(s: int) -> Invariant:
    """Return the invariant of stale synchronous parallel training with staleness `s`.

    At clock c a group has its own updates and those of all groups of clocks up to c − s − 1; it may have
    later ones. No group is more than s steps ahead of the slowest.
    """

    def invariant(run: Callable[..., list[Any]], new: NewMethod, P: int, K: int) -> None:
        for rank, (seen, ahead, _) in enumerate(run(P * K, tallied, new, P)):
            for c, cells in enumerate(seen):
                assert cells[:, : max(c - s, 0)].eq(1).all()
                assert cells[rank // K, :c].eq(1).all()
                assert cells.eq(0).logical_or(cells.eq(1)).all()
            assert max(ahead) <= s

    invariant.__name__ = f"reads_within_{s}"
    return invariant


def synchronization(
    world: Communicator, new: NewMethod, P: int, steps: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Make steps with zero gradients from different starting points.

    Returns:
        This group's parameters before and after, and the mean of all groups before and after.
    """
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
    """Check that synchronization changes the model of at least one group, and never the mean of all groups.

    Some groups may keep their model, because they finish before another group sends them a request.
    """
    ranks = run(P * K, synchronization, new, P, 12)
    for _, _, before, after in ranks:
        torch.testing.assert_close(after, before, rtol=0, atol=1e-12)
    if P > 1:
        assert any(not torch.equal(start, end) for start, end, _, _ in ranks)
