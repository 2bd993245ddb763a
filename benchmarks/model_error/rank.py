"""Run on every rank of shaped hosts, and write the time of computing and of a step of every cell to --out."""

from __future__ import annotations

import argparse
import gc
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn, optim

import hpcsgd
from harness import WallClock
from harness.mpi import Together
from hpcsgd.comm import Communicator, mpi
from hpcsgd.core.topology import form
from model_error.cells import (
    CLASSES,
    INPUTS,
    METHODS,
    RANKS_PER_HOST,
    STEPS,
    B,
    Cell,
    cells,
    network,
)

TIMES = 7
"""Number of times that computing alone is timed."""


def sgd(net: nn.Module) -> optim.Optimizer:
    return optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)


def computing(model: str, batch: int, ranks: Together) -> dict[str, float]:
    """Return the seconds of forward, backward and update on the slowest rank, while all are busy."""
    net = network(model)
    optimizer = sgd(net)
    x, y = torch.randn(batch, INPUTS), torch.randint(CLASSES, (batch,))
    clock, rows = WallClock(), []
    for _ in range(TIMES + 2):
        ranks.meet()
        optimizer.zero_grad()
        times = [0.0]
        clock.start()
        loss = nn.functional.cross_entropy(net(x), y)
        times.append(clock.stop())
        loss.backward()
        times.append(clock.stop())
        optimizer.step()
        times.append(clock.stop())
        rows.append([ranks.slowest(b - a) for a, b in itertools.pairwise(times)])
    forward, backward, update = (median(column) for column in zip(*rows[2:], strict=True))
    return {"model": model, "batch": batch, "forward": forward, "backward": backward, "update": update}  # type: ignore[dict-item]


def seconds(
    world: Communicator, cell: Cell, blocks: int, ranks: Together
) -> tuple[list[float], dict[str, float]]:
    """Return the seconds of a step for each block, and how long of a step ranks waited in each phase.

    The seconds are those of the slowest rank, averaged over the steps of a block. The waits are means over
    the ranks.
    """
    topology, net = form(world, groups=cell.P), network(cell.model)
    optimizer = hpcsgd.DistributedOptimizer(sgd(net), net, topology, METHODS[cell.method]())
    x, y = torch.randn(B // cell.K, INPUTS), torch.randint(CLASSES, (B // cell.K,))

    steps = STEPS[cell.method]

    def block() -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()

    block()
    clock, found, before = WallClock(), [], world.stats.totals()
    for _ in range(blocks):
        ranks.meet()
        clock.start()
        block()
        found.append(ranks.slowest(clock.stop()) / steps)
    stood = {name: total.waited / (blocks * steps) for name, total in world.stats.since(before).items()}
    optimizer.state_dict()  # waits for pending messages
    topology.world.close_dups(60.0)
    return found, ranks.mean(stood)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", required=True)
    parser.add_argument("--shapes", nargs="+", required=True)
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    given = parser.parse_args(words)
    torch.set_num_threads(1)
    world, ranks = mpi.world(), Together()
    shapes = [(int(P), int(K)) for P, K in (shape.split("x") for shape in given.shapes)]
    batches = sorted({B // K for _, K in shapes})
    alone = [computing(model, batch, ranks) for model in given.models for batch in batches]
    found: dict[Cell, list[float]] = {}
    stood: dict[Cell, dict[str, float]] = {}
    for _ in range(given.rounds):
        for cell in cells(given.models, shapes):
            times, stood[cell] = seconds(world, cell, given.blocks, ranks)
            found.setdefault(cell, []).extend(times)
            gc.collect()
    if world.rank == 0:
        rows: list[dict[str, Any]] = [
            {**asdict(cell), "seconds": times, "stood": stood[cell]} for cell, times in found.items()
        ]
        result = {"computing": alone, "cells": rows, "ranks_per_host": RANKS_PER_HOST}
        given.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
