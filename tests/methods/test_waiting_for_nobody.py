"""Tests of SSP, asynchronous SGD and AD-PSGD beyond the battery, whatever the speed of the ranks."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn, optim
from torch.utils._pytree import tree_map

import hpcsgd
from ahead import others_made
from hpcsgd.comm import Communicator, threads
from hpcsgd.core.topology import form
from hpcsgd.engine.optimizer import DistributedOptimizer
from hpcsgd.errors import UserError
from hpcsgd.methods import Method, ad_psgd, async_sgd, bsp, hierarchical, ssp, switch
from hpcsgd.parts.averagers.parameter_server import ParameterServer
from methods.invariants import tallying
from methods.test_battery import OPTIMIZERS, with_optimizers
from references import distributed, vector

SHAPES = [(2, 1), (3, 1), (4, 1), (2, 2), (4, 2), (8, 1)]
STEPS = 6


@pytest.mark.parametrize(("P", "K", "optimizer"), with_optimizers(SHAPES, ["SGD", "momentum"]))
def test_ssp_that_may_not_be_stale_is_bsp(run, P: int, K: int, optimizer: str) -> None:
    make = OPTIMIZERS[optimizer]
    ours = run(P * K, lambda world: distributed(world, P, ssp(0), make, STEPS))
    theirs = run(P * K, lambda world: distributed(world, P, bsp(), make, STEPS))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)


def kept(optimizer: DistributedOptimizer) -> Tensor:
    """Return the shard that the server keeps on this rank, or the x that AD-PSGD averages."""
    how = optimizer.method.averager
    if isinstance(how, ParameterServer):
        how.model()  # waits until all updates are added
        assert how.keeper is not None
        return how.keeper.part[0].view(-1)
    return optimizer.method.state_dict()["averager"].sharded["x"][0].view(-1)


@pytest.mark.parametrize("n", [2, 4])
def test_another_method_starts_from_what_the_server_has(run, n: int) -> None:
    """It does not start from the mean of what groups have read, which may be older."""
    steps = 4

    def cells(world: Communicator) -> Tensor:
        topology = form(world, groups=world.size)
        net, optimizer = tallying(topology, switch(async_sgd(), hierarchical(100), at=steps), steps)
        for t in range(steps):
            time.sleep(0.02 * topology.group_index)
            net.mark(topology.group_index, t)
            optimizer.step()
        return net.cells.detach().clone()

    for seen in run(n, cells):
        assert torch.equal(seen, torch.ones(n, steps))


@pytest.mark.ranks(2)
def test_the_servers_model_counts_also_inside_a_switch(run) -> None:
    """The model that a group has read is old; the server's model includes the updates of the slow group."""

    def cells(world: Communicator) -> Tensor:
        topology = form(world, groups=2)
        net, optimizer = tallying(topology, switch(bsp(), async_sgd(), at=1), 3)
        net.mark(topology.group_index, 0)
        optimizer.step()
        for t in (1, 2):
            time.sleep(0.05 * topology.group_index)
            net.mark(topology.group_index, t)
            optimizer.step()
        with optimizer.averaged_model():
            return net.cells.detach().clone()[:, 1:]

    for seen in run(2, cells):
        assert torch.equal(seen, torch.ones(2, 2))


class Clocks:
    """Counts from outside how many steps every rank has finished; it works only for threads."""

    def __init__(self, n: int) -> None:
        self.finished = [0] * n
        self.furthest = 0

    def tick(self, rank: int) -> None:
        self.finished[rank] += 1
        self.furthest = max(self.furthest, self.finished[rank] - min(self.finished))


def adversary(world: Communicator, clocks: Clocks, method: Method, schedules: int) -> Tensor:
    """Train with random delays: in every schedule of 4 steps another rank is slow, and others sometimes are.

    Returns:
        The parameters at the end.
    """
    topology = form(world, groups=world.size)
    net, optimizer = tallying(topology, method, 1)
    for seed in range(schedules):
        pace = random.Random(f"{seed} {world.rank}")
        slowest = random.Random(seed).randrange(world.size)
        for _ in range(4):
            if world.rank == slowest or pace.random() < 0.2:
                time.sleep(pace.choice([0, 1e-4, 5e-4]))
            net.mark(topology.group_index, 0)
            optimizer.step()
            clocks.tick(world.rank)
    return kept(optimizer)


@pytest.mark.slow
@pytest.mark.parametrize(
    "s", [0, pytest.param(1, marks=pytest.mark.long), 2, pytest.param(4, marks=pytest.mark.long)]
)
def test_nobody_runs_further_ahead(s: int) -> None:
    """Each case has 250 random schedules.

    A read that has finished is not counted before the next tick of the clock.
    """
    clocks = Clocks(3)
    threads.run(3, lambda world: adversary(world, clocks, ssp(s), 250), timeout=300)
    assert s <= clocks.furthest <= s + 1
    assert clocks.finished == [1000, 1000, 1000]


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_pairs_in_random_interleavings(n: int) -> None:
    """In 250 random schedules no rank waits forever."""
    ranks = threads.run(n, lambda world: adversary(world, Clocks(n), ad_psgd(), 250), timeout=300)
    total = torch.stack(ranks).sum(0)
    torch.testing.assert_close(total, torch.full((n,), 1000.0 * n), rtol=1e-5, atol=0)


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize(("method", "ahead"), [(partial(ssp, 0), 0), (partial(ssp, 2), 2), (async_sgd, 4)])
def test_a_slow_group_lets_the_others_go_on(
    run, tmp_path: Path, method: Callable[[], Method], ahead: int
) -> None:
    """The other group makes one step more than s: no group waits for the push after the last allowed read."""

    def trained(world: Communicator) -> int:
        topology = form(world, groups=world.size)
        net, optimizer = tallying(topology, method(), 5)

        def step(t: int) -> None:
            net.mark(topology.group_index, t)
            optimizer.step()

        step(0)
        world.barrier()
        return others_made(world, tmp_path, step, range(1, 5), ahead)

    assert run(2, trained)[1] == ahead


def gossiping(world: Communicator, P: int, steps: int) -> tuple[Tensor, Tensor]:
    """Train from different initial values at learning rate 0.

    Returns:
        The mean of all initial values, and where this group ends.
    """
    topology = form(world, groups=P)
    net = nn.Linear(5, 3, bias=False).double()
    optimizer = hpcsgd.DistributedOptimizer(optim.SGD(net.parameters(), lr=0.0), net, topology, ad_psgd())
    with torch.no_grad():
        net.weight.fill_(float(topology.group_index))
    mean = vector(net)
    topology.inter_group.allreduce(mean).wait()
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.ones(1, 5, dtype=torch.float64)).sum().backward()
        optimizer.step()
        time.sleep(1e-3)
    return mean / P, vector(net)


@pytest.mark.parametrize(("P", "K"), [(2, 1), (4, 1), (2, 2), (4, 2)])
def test_pairs_come_to_agree(run, P: int, K: int) -> None:
    for mean, mine in run(P * K, lambda world: gossiping(world, P, 60)):
        torch.testing.assert_close(mine, mean, rtol=0, atol=0.2)


@pytest.mark.ranks(2)
def test_what_is_noted(run) -> None:
    """A slow group's gradient misses the updates that the fast group made meanwhile."""

    def noted(world: Communicator, method: Callable[[], Method]) -> list[dict[str, float]]:
        topology = form(world, groups=world.size)
        net, optimizer = tallying(topology, method(), 3)
        notes = []
        for t in range(3):
            if t == 1:
                world.barrier()
                if world.rank == 1:  # until the other rank has finished
                    world.recv(torch.zeros(1), 0).wait()
            net.mark(topology.group_index, t)
            optimizer.step()
            notes.append(dict(optimizer.metrics))
        if world.rank == 0:
            world.send(torch.zeros(1), 1).wait()
        return notes

    fast, slow = run(2, lambda world: noted(world, async_sgd))
    assert [note["ahead"] for note in fast] == [pytest.approx(fast[0]["ahead"]), 1, 2]
    assert slow[0]["staleness"] + slow[1]["staleness"] == 3  # all of the fast group; the first of them
    assert slow[1]["staleness"] >= 2  # may come before the slow one's first step
    assert slow[1]["ahead"] == 0
    assert slow[2]["staleness"] == 0
    _, passive = run(2, lambda world: noted(world, ad_psgd))
    assert passive[1]["staleness"] >= 1


@pytest.mark.parametrize("P", [2, 4])
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("method", [lambda: ssp(1), async_sgd, ad_psgd])
def test_goes_on_from_its_state(run, P: int, fresh: bool, method: Callable[[], Method]) -> None:
    """No update is lost or counted twice between the two halves, even if others were made in between."""

    def halves(world: Communicator) -> Tensor:
        topology = form(world, groups=P)
        net, optimizer = tallying(topology, method(), 6)
        for t in range(3):
            net.mark(topology.group_index, t)
            optimizer.step()
        weights, state = net.cells.detach().clone(), optimizer.state_dict()
        state = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, state)
        again, resumed = tallying(topology, method(), 6) if fresh else (net, optimizer)
        if not fresh:
            net.mark(topology.group_index, 5)
            optimizer.step()
        with torch.no_grad():
            again.cells.copy_(weights)
        resumed.load_state_dict(state)
        for t in range(3, 6):
            again.mark(topology.group_index, t)
            resumed.step()
        return kept(resumed)

    parts = run(P, halves)
    whole = torch.stack(parts).sum(0) / P if method is ad_psgd else torch.cat(parts)
    torch.testing.assert_close(whole, torch.ones(P * 6), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("P", "K"), [(2, 1), (4, 1), (2, 2)])
def test_bytes_of_a_step(run, P: int, K: int) -> None:
    """A rank sends its update to all other servers, and its part of the server to all other groups.

    Only the sum over the ranks is checked, because some answers may still be pending.
    """

    def recorded(world: Communicator) -> dict[str, float]:
        topology = form(world, groups=P)
        net = nn.Linear(24, 16, bias=False)
        optimizer = hpcsgd.DistributedOptimizer(
            optim.SGD(net.parameters(), lr=0.1), net, topology, async_sgd()
        )
        before = world.stats.totals()
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.ones(2, 24)).sum().backward()
            optimizer.step()
        world.barrier()
        return {name: total.bytes for name, total in world.stats.since(before).items() if total.bytes}

    part = 24 * 16 // (P * K) * 4 + 8
    ranks = run(P * K, recorded)
    assert sum(sent["model_average"] for sent in ranks) == P * K * 3 * 2 * (P - 1) * part
    assert all(sent.keys() <= {"model_average", "grad_reduce", "param_gather"} for sent in ranks)


def test_refusals() -> None:
    with pytest.raises(UserError, match="max_staleness = -1"):
        ssp(-1)
