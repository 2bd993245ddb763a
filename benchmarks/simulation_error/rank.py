"""Measure on each of four shaped hosts the seconds of computing and the steps per second of every case."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from time import sleep

import torch
from torch import nn, optim

import hpcsgd
from harness import WallClock
from harness.mpi import Together
from hpcsgd.comm import Communicator, mpi
from hpcsgd.core.topology import form
from simulation_error.cases import CASES, FIRST, INPUTS, LATE, SECONDS, P, factor, network


def computed(net: nn.Module, seconds: float) -> None:
    x, y = torch.randn(8, INPUTS), torch.randint(10, (8,))
    sleep(seconds)
    nn.functional.cross_entropy(net(x), y).backward()


def alone(ranks: Together, steps: int) -> float:
    """Return the seconds that a rank computes while all ranks compute."""
    net, clock, found = network(), WallClock(), []
    for _ in range(steps):
        ranks.meet()
        clock.start()
        computed(net, SECONDS)
        found.append(clock.stop())
    return ranks.slowest(median(found))


def rate(world: Communicator, method: str, late: str, steps: int, ranks: Together) -> float:
    """Return steps per second of a group, the mean over the groups, each until its last step."""
    topology, net = form(world, groups=P), network()
    optimizer = hpcsgd.DistributedOptimizer(
        optim.SGD(net.parameters(), lr=1e-4), net, topology, CASES[method].method()
    )
    clock = WallClock()
    for t in range(FIRST + steps):
        if t == FIRST:
            optimizer.state_dict()
            ranks.meet()
            clock.start()
        optimizer.zero_grad()
        computed(net, SECONDS * factor(late, world.rank, t))
        optimizer.step()
    mine = steps / clock.stop()
    optimizer.state_dict()
    topology.world.close_dups(60.0)
    total = torch.tensor([mine], dtype=torch.float64)
    world.allreduce(total, "mean").wait()
    return total.item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--methods", nargs="+", required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    world, ranks = mpi.world(), Together()
    result = {
        "computing": alone(ranks, 9),
        "rates": {
            method: {late: rate(world, method, late, given.steps, ranks) for late in LATE}
            for method in given.methods
        },
    }
    if world.rank == 0:
        given.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
