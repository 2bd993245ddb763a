"""Short trainings of a CNN on MNIST by the library itself, on n ranks, which are threads of one process.

The loss of every step and the method's metrics are recorded.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import nn, optim
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import MultiStepLR

import hpcsgd
from density.tasks import Samples, images
from harness import WallClock
from hpcsgd.comm import Communicator, threads
from hpcsgd.core.topology import form
from hpcsgd.data import ByLabel, DefDP, Partition, SelDP, convert
from hpcsgd.data.partition import Samples as PartitionSamples
from hpcsgd.models import cnn
from hpcsgd.train.process import keep_freed_memory
from papers.artifact import Place, Row

SEED = 1
POINTS = 60
"""The largest number of points of a curve. A point is the mean over neighboring steps."""
MILESTONES = (0.6, 0.85)
PARTITIONS: dict[str, Partition] = {"IID": DefDP(), "SelDP": SelDP(), "one label": ByLabel()}
LAYER = 0
"""The index of the parameter whose values are kept: the weights of the first convolution."""
Make = Callable[[], hpcsgd.Method]


@dataclass(frozen=True)
class Training:
    """One contestant. Each rank calls `method` to get its own instance."""

    who: str
    method: Make
    workers: int = 8
    alone: bool = True
    """True if each worker is a group; False if all workers are one group."""
    partition: str = "IID"
    batch: int = 16
    """Samples per worker and step."""
    steps: int = 400
    lr: float = 0.02
    evaluations: int = 8


def loaded(place: Place, count: int) -> Samples:
    """Return the first images of MNIST; in a quick run, the digits."""
    if not place.quick:
        return images(place.data / "mnist.h5", count)
    with tempfile.TemporaryDirectory() as folder:
        convert("digits", None, Path(folder) / "digits.h5")
        return images(Path(folder) / "digits.h5", count)


def trained(training: Training, samples: Samples) -> Row:
    """Run one training, and return its row."""
    torch.set_num_threads(1)
    keep_freed_memory()
    clock = WallClock()
    torch.manual_seed(SEED)  # here, because the threads share this generator
    start = cnn(tuple(samples.x.shape[1:]), widths=(8, 16))
    found = threads.run(training.workers, partial(_rank, training, samples, start), timeout=3600)
    losses = [mean(of_step) for of_step in zip(*(each["losses"] for each in found), strict=True)]
    metrics = {name: thinned(values) for name, values in found[0]["metrics"].items()}
    row = {"who": training.who, "workers": training.workers, "partition": training.partition,
           "steps": training.steps, "losses": thinned(losses), "tested": found[0]["tested"],
           "accuracy": found[0]["tested"][-1][1], "metrics": metrics, "weights": found[0]["weights"],
           "seconds": round(clock.stop(), 1)}  # fmt: skip
    print(f"{training.who}: {row['accuracy']:.4f} in {row['seconds']:.0f} s", flush=True)
    return row


def _rank(training: Training, samples: Samples, start: nn.Module, world: Communicator) -> dict[str, Any]:
    model = copy.deepcopy(start)
    sgd = optim.SGD(model.parameters(), lr=training.lr, momentum=0.9)
    topology = form(world, groups=world.size if training.alone else 1)
    optimizer = hpcsgd.DistributedOptimizer(sgd, model, topology, method=training.method())
    schedule = MultiStepLR(optimizer, [int(part * training.steps) for part in MILESTONES])
    rows, losses, tested = _rows(training, samples, world.rank), [], []
    metrics: dict[str, list[float]] = {}
    weights: dict[str, list[float]] = {}
    for step, mine in enumerate(rows.split(training.batch)[: training.steps], 1):
        optimizer.zero_grad()
        loss = cross_entropy(model(samples.x[mine]), samples.y[mine])
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        for name, value in optimizer.metrics.items():
            metrics.setdefault(name, []).append(value)
        if step % (training.steps // training.evaluations) == 0:
            tested.append((step, _accuracy(optimizer, model, samples)))
            weights[str(step)] = _quantiles(model)
    return {"losses": losses, "metrics": metrics, "tested": tested, "weights": weights}


def _rows(training: Training, samples: Samples, rank: int) -> torch.Tensor:
    """Return a worker's samples in order, for all its steps. Each epoch ends with a whole batch."""
    assigned = PartitionSamples(len(samples.x), training.workers, SEED, labels=samples.y.numpy())
    found: list[np.ndarray[Any, Any]] = []
    needed, epoch = training.steps * training.batch, 0
    while sum(map(len, found)) < needed:
        hand = PARTITIONS[training.partition].assign(assigned, rank, epoch)
        found.append(hand[: len(hand) // training.batch * training.batch])
        epoch += 1
    return torch.from_numpy(np.concatenate(found))


@torch.no_grad()
def _accuracy(optimizer: hpcsgd.DistributedOptimizer, model: nn.Module, samples: Samples) -> float:
    """Return the test accuracy of the mean model; collective."""
    with optimizer.averaged_model():
        model.eval()
        right = sum(
            int((model(x).argmax(1) == y).sum())
            for x, y in zip(samples.test_x.split(250), samples.test_y.split(250), strict=True)
        )
        model.train()
    return right / len(samples.test_x)


def _quantiles(model: nn.Module) -> list[float]:
    """Return the 1 % to 99 % quantiles of this worker's weights in one layer."""
    weights = list(model.parameters())[LAYER].detach().flatten()
    return [round(q, 5) for q in weights.quantile(torch.linspace(0.01, 0.99, 21)).tolist()]


def thinned(values: list[float]) -> list[float]:
    """Return at most `POINTS` values, which are means of neighboring ones."""
    width = -(-len(values) // POINTS)
    return [float(f"{mean(values[i : i + width]):.5g}") for i in range(0, len(values), width)]


def xs(row: Row, values: list[float]) -> list[float]:
    """Return the step that belongs to each of the thinned values."""
    return [(i + 0.5) * row["steps"] / len(values) for i in range(len(values))]
