"""One training of `late_accuracy.py` by the library; the groups are threads of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from math import cos, pi
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import hpcsgd
from density.tasks import Samples
from density.training import loss_of, test
from harness import WallClock
from hpcsgd.comm import Communicator, threads
from hpcsgd.core.topology import form
from hpcsgd.parts import quantizers
from hpcsgd.train.process import keep_freed_memory
from late_accuracy.tasks import Task

GROUPS, EVERY = 4, 8
WARM_UP = 0.05
"""Share of the steps in which the learning rate rises."""
TIMEOUT = 3600.0


def plain() -> hpcsgd.Method:
    return hpcsgd.hierarchical(EVERY)


PLAIN = "plain"
CONTESTANTS: dict[str, Callable[[], hpcsgd.Method]] = {
    PLAIN: plain,
    "delayed 1": lambda: hpcsgd.delayed(plain(), sync_delay=1),
    "delayed 4": lambda: hpcsgd.delayed(plain(), sync_delay=4),
    "streaming": lambda: hpcsgd.streaming(plain(), num_fragments=4, sync_delay=2),
    "8 bits": lambda: hpcsgd.hierarchical(EVERY, quantize=quantizers.int8()),
    "4 bits": lambda: hpcsgd.hierarchical(EVERY, quantize=quantizers.int4()),
}


def measure(task: Task, who: str, seed: int, folder: Path) -> dict[str, Any]:
    """Return a row: the quality of the mean of the groups at the end."""
    clock = WallClock()
    torch.set_num_threads(1)
    keep_freed_memory()
    torch.manual_seed(seed)
    samples, start = task.samples(folder, task.count), task.build()
    found = threads.run(GROUPS, train, task, samples, start, who, seed, timeout=TIMEOUT)
    row = {"who": who, "seed": seed, "samples": task.count, "epochs": task.epochs, "groups": GROUPS}
    means = {name: mean(each[name] for each in found) for name in found[0]}
    return {**row, **means, "seconds": round(clock.stop(), 1)}


def train(
    world: Communicator, task: Task, samples: Samples, start: nn.Module, who: str, seed: int
) -> dict[str, float]:
    """Train as one of the groups, and return the quality of the mean of all on a share of the test split."""
    model, rows = copy.deepcopy(start), batches(task, len(samples.x), seed, world.rank)
    topology = form(world, groups=GROUPS)
    optimizer = hpcsgd.DistributedOptimizer(
        task.optimizer(model.parameters()), model, topology, method=CONTESTANTS[who]()
    )
    schedule = LambdaLR(optimizer, lambda t: rate((t + 1) / len(rows)))
    distances = []
    for mine in rows:
        optimizer.zero_grad()
        loss_of(model(samples.x[mine]), samples.y[mine]).backward()
        optimizer.step()
        schedule.step()
        distances.append(optimizer.metrics.get("distance"))
    with optimizer.averaged_model():
        share = slice(world.rank, None, world.size)
        good = test(model, Samples(samples.x, samples.y, samples.test_x[share], samples.test_y[share]))
    return {**good, "steps": len(rows), "distance": mean(D for D in distances if D is not None)}


def rate(part: float) -> float:
    """Return the share of the highest learning rate after this part of the steps."""
    return min(part / WARM_UP, 0.5 * (1 + cos(pi * min(part, 1.0))))


def batches(task: Task, count: int, seed: int, group: int) -> list[Tensor]:
    """Return the rows of the group's batches; the order of the samples differs in every epoch."""
    chance, step = torch.Generator().manual_seed(seed), GROUPS * task.batch
    orders = (torch.randperm(count, generator=chance)[: count // step * step] for _ in range(task.epochs))
    return [rows for order in orders for rows in order.view(-1, GROUPS, task.batch)[:, group]]
