"""One rank of `time_to_quality.py`. All ranks run the given trainings; rank 0 writes a row for each.

A training is not interrupted. Each rank copies its model at some steps. After the last step, when the clock
has stopped, the copies are averaged over all ranks and scored.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor, nn

import hpcsgd
from density.tasks import Samples
from harness import WallClock
from harness.mpi import Together
from hpcsgd.train.process import keep_freed_memory
from step_time.rank import sent, silent
from time_to_quality.contestants import CONTESTANTS, Start
from time_to_quality.tasks import QUICK, TASKS, Task, score

WORLD, RANKS = MPI.COMM_WORLD, Together()
POINTS = 12
"""Number of points of a training at which the model is scored."""
PORT = 29500
Row = dict[str, Any]


@dataclass(frozen=True)
class Course:
    """What a rank records at some steps of a training."""

    steps: list[int] = field(default_factory=list[int])
    seconds: list[float] = field(default_factory=list[float])
    sent: list[int] = field(default_factory=list[int])
    """Bytes that have left this host."""
    models: list[Tensor] = field(default_factory=list[Tensor])

    def note(self, step: int, seconds: float, out: int, model: nn.Module) -> None:
        self.steps.append(step)
        self.seconds.append(seconds)
        self.sent.append(out)
        self.models.append(flat(model))


def flat(model: nn.Module) -> Tensor:
    """Return the parameters and the statistics of batch normalization as one vector."""
    return torch.cat([x.detach().flatten() for x in vectors(model)])


def vectors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *(x for x in model.buffers() if x.is_floating_point())]


def put(values: Tensor, model: nn.Module) -> None:
    """Set the values of a model to `values`, which `flat` has returned."""
    with torch.no_grad():
        for x, part in zip(vectors(model), values.split([x.numel() for x in vectors(model)]), strict=True):
            x.copy_(part.view_as(x))


def train(task: Task, samples: Samples, who: str, told: Row, topology: hpcsgd.Topology) -> Row:
    """Train once, and return the row."""
    torch.manual_seed(told["seed"])
    model = task.build()
    mine = batches(task, len(samples.x), told["seed"], told["steps"])[:, WORLD.rank :: WORLD.size]
    batch = samples.x[mine[0]], samples.y[mine[0]]
    start = Start(task, model, told["lr"], told["steps"], batch, RANKS)
    update = CONTESTANTS[who](start, topology)
    course, points = Course(), {round(told["steps"] * (i + 1) / POINTS) for i in range(POINTS)}
    settle()
    RANKS.meet()
    before, clock = out(), WallClock()
    for step, rows in enumerate(mine, 1):
        update(samples.x[rows], samples.y[rows])
        if step in points:
            course.note(step, clock.stop(), out() - before, model)
    return {**told, "who": who, "parameters": sum(p.numel() for p in model.parameters()),
            **judged(task, samples, course, task.build())}  # fmt: skip


def settle() -> None:
    """Wait until no messages are under way between hosts."""
    if has_links():
        silent()


def has_links() -> bool:
    return "HPCSGD_NET" in os.environ


def out() -> int:
    """Return the bytes that have left this host; 0 if there is only one host."""
    return sent() if has_links() else 0


def batches(task: Task, count: int, seed: int, steps: int) -> Tensor:
    """Return indices of samples, [steps, samples of all ranks], in a new order in every epoch."""
    chance, together = torch.Generator().manual_seed(seed), task.batch * WORLD.size
    epochs = -(-steps * together // count)
    order = torch.cat([torch.randperm(count, generator=chance) for _ in range(epochs)])
    return order[: steps * together].view(steps, together)


def judged(task: Task, samples: Samples, course: Course, model: nn.Module) -> Row:
    """Return the score of the mean of all ranks' models at each point, with seconds and megabytes.

    Each rank tests a share of the test samples; collective.
    """
    share = slice(WORLD.rank, None, WORLD.size)
    scores = []
    for mine in course.models:
        total = np.empty_like(mine.numpy())
        WORLD.Allreduce(mine.numpy(), total)
        put(torch.from_numpy(total) / WORLD.size, model)
        found = score(task, model, samples.test_x[share], samples.test_y[share])
        scores.append(WORLD.allreduce(found) / len(samples.test_x))
    seconds = [RANKS.slowest(each) for each in course.seconds]
    megabytes = [fmean(WORLD.allgather(each)) / 1e6 for each in course.sent]
    return {"at": course.steps, "seconds": seconds, "megabytes": megabytes, "scores": scores}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True, help="the file for one line per training")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--task", required=True)
    parser.add_argument("--groups", type=int, required=True)
    parser.add_argument("--trainings", required=True, help="a JSON list of trainings")
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    host = "10.77.0.1" if has_links() else "127.0.0.1"
    dist.init_process_group(
        "gloo", init_method=f"tcp://{host}:{PORT}", rank=WORLD.rank, world_size=WORLD.size
    )
    topology = hpcsgd.init(groups=given.groups)
    task = (TASKS | QUICK)[given.task]
    samples = task.samples(given.data)
    for told in json.loads(given.trainings):
        row = train(task, samples, told.pop("who"), told, topology)
        gc.collect()
        if WORLD.rank == 0:
            with given.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
    WORLD.Barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
