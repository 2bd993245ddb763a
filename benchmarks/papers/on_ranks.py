"""Short trainings by the library itself on n ranks, which are threads of one process: a CNN on MNIST, whose
every step tells its loss and what the method notes."""

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
from hpcsgd.data.partition import Samples as Dealt
from hpcsgd.models import cnn
from hpcsgd.train.process import keep_freed_memory
from papers.artifact import Place, Row

SEED = 1
POINTS = 60
"""Of a curve, each the mean over as many steps as it takes."""
MILESTONES = (0.6, 0.85)
PARTITIONS: dict[str, Partition] = {"IID": DefDP(), "SelDP": SelDP(), "one label": ByLabel()}
LAYER = 0
"""Whose weights are kept: those of the first convolution."""
Make = Callable[[], hpcsgd.Method]


@dataclass(frozen=True)
class Training:
    """One contestant, its `method` made on every rank."""

    who: str
    method: Make
    workers: int = 8
    alone: bool = True
    """A group each; else one group of all."""
    partition: str = "IID"
    batch: int = 16
    """Of a worker."""
    steps: int = 400
    lr: float = 0.02
    evaluations: int = 8


def loaded(place: Place, count: int) -> Samples:
    """The first images of MNIST; digits where it has to be quick."""
    if not place.quick:
        return images(place.data / "mnist.h5", count)
    with tempfile.TemporaryDirectory() as folder:
        convert("digits", None, Path(folder) / "digits.h5")
        return images(Path(folder) / "digits.h5", count)


def trained(training: Training, samples: Samples) -> Row:
    """Its row."""
    torch.set_num_threads(1)
    keep_freed_memory()
    clock = WallClock()
    torch.manual_seed(SEED)  # here, since threads would draw from the same generator by turns
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
    """The samples of a worker, in order, for all its steps; epochs end with a whole batch."""
    dealt = Dealt(len(samples.x), training.workers, SEED, labels=samples.y.numpy())
    found: list[np.ndarray[Any, Any]] = []
    needed, epoch = training.steps * training.batch, 0
    while sum(map(len, found)) < needed:
        hand = PARTITIONS[training.partition].assign(dealt, rank, epoch)
        found.append(hand[: len(hand) // training.batch * training.batch])
        epoch += 1
    return torch.from_numpy(np.concatenate(found))


@torch.no_grad()
def _accuracy(optimizer: hpcsgd.DistributedOptimizer, model: nn.Module, samples: Samples) -> float:
    """Of the mean model; collective."""
    with optimizer.averaged_model():
        model.eval()
        right = sum(
            int((model(x).argmax(1) == y).sum())
            for x, y in zip(samples.test_x.split(250), samples.test_y.split(250), strict=True)
        )
        model.train()
    return right / len(samples.test_x)


def _quantiles(model: nn.Module) -> list[float]:
    """Of this worker's weights in one layer, 1 % to 99 %."""
    weights = list(model.parameters())[LAYER].detach().flatten()
    return [round(q, 5) for q in weights.quantile(torch.linspace(0.01, 0.99, 21)).tolist()]


def thinned(values: list[float]) -> list[float]:
    """At most `POINTS`, means of neighbours."""
    width = -(-len(values) // POINTS)
    return [float(f"{mean(values[i : i + width]):.5g}") for i in range(0, len(values), width)]


def xs(row: Row, values: list[float]) -> list[float]:
    """The steps that belong to thinned values."""
    return [(i + 0.5) * row["steps"] / len(values) for i in range(len(values))]
