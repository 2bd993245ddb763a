"""One training of `density.py`: 16 virtual workers of one group, which take turns in one process.

The library decides what each worker selects. The first to take its turn is the one that decides for all
(worker t mod n). The rest of a sparse gradient reduction, algorithm 1 of the DEFT paper, takes five lines
here. `difference` compares them with `hpcsgd.Sparse` on 16 real ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, cast

import torch
from torch import Tensor, nn, optim
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import MultiStepLR

import hpcsgd
from density.tasks import TASKS, Samples, Task
from harness import WallClock
from hpcsgd import kernels
from hpcsgd.comm import Communicator, threads
from hpcsgd.core.topology import form
from hpcsgd.data import ByLabel
from hpcsgd.data.partition import Samples as Labelled
from hpcsgd.data.windows import IGNORED
from hpcsgd.parts.grad_reduces.combining import joint_indices
from hpcsgd.parts.sparsifiers import Accumulated, Adapting, Sparsifier
from hpcsgd.parts.sparsifiers.base import wanted
from hpcsgd.train.process import keep_freed_memory

WORKERS = 16
SEED = 1
POINTS = 100
"""Number of points of a curve; each is the mean over a range of steps."""
LAST = 20
"""The error at the end is the mean over the last one of so many parts of the run."""
MILESTONES = (0.6, 0.85)
DENSE, DEFT, TOP_K, CLT_K, THRESHOLD = "dense", "DEFT", "Top-k", "CLT-k", "hard threshold"
MICRO, EXDYNA = "MiCRO", "ExDyna"
SPARSIFIERS: dict[str, Callable[[float], Sparsifier]] = {
    TOP_K: hpcsgd.TopK,
    CLT_K: hpcsgd.CLTk,
    DEFT: hpcsgd.Deft,
    MICRO: hpcsgd.MiCRO,
    EXDYNA: hpcsgd.ExDyna,
    "SIDCo": hpcsgd.SIDCo,
}
SHUFFLED, BY_LABEL = "shuffled", "by label"
"""Ways to divide samples: newly in every epoch, or so that each worker has one label, which two may share."""
CONTESTANTS = (DENSE, *SPARSIFIERS, THRESHOLD)


def measure(name: str, who: str, folder: Path, partition: str, count: int, epochs: int) -> dict[str, Any]:
    """Train, and return a row: density of what was sent, remaining error, and quality after `epochs`."""
    clock = WallClock()
    torch.set_num_threads(1)
    keep_freed_memory()
    task = TASKS[name]
    samples, model = task.samples(folder, count), started(task)
    row: dict[str, Any] = {"task": name, "who": who, "partition": partition}
    row |= {"samples": count, "epochs": epochs}
    workers = [batches(task, samples, partition, rank, epochs) for rank in range(WORKERS)]
    make = SPARSIFIERS.get(who)
    if who == THRESHOLD:
        row["threshold"] = first_threshold(task, samples, model, [mine[0] for mine in workers])
        make = partial(_of_threshold, row["threshold"])
    densities, errors = train(task, samples, model, make, workers)
    row |= {"steps": len(densities)} | _density(densities, task.density) | _error(errors)
    return row | test(model, samples) | {"seconds": round(clock.stop(), 1)}


def train(
    task: Task,
    samples: Samples,
    model: nn.Module,
    make: Callable[[float], Sparsifier] | None,
    workers: list[list[Tensor]],
) -> tuple[list[float], list[float]]:
    """Return density and error of every step with the `batches` of the workers.

    Without `make` everything is sent.
    """
    sgd = optim.SGD(model.parameters(), lr=task.lr, momentum=task.momentum)
    schedule = MultiStepLR(sgd, [int(part * len(workers[0])) for part in MILESTONES])
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and module.momentum is not None:
            module.momentum /= WORKERS  # one model sees what 16 models would see, and average
    g = flat_gradient(model)
    grad_reduce = None if make is None else Exchange(model, g, [make(task.density) for _ in range(WORKERS)])
    densities, errors = [], []
    for step in zip(*workers, strict=True):
        for rank, rows in enumerate(step):
            loss_of(model(samples.x[rows]), samples.y[rows]).backward()
            if grad_reduce is not None:
                grad_reduce.take_in(rank)
        density, error = (1.0, 0.0) if grad_reduce is None else grad_reduce.combine()
        if grad_reduce is None:
            g /= WORKERS
        sgd.step()
        schedule.step()
        g.zero_()
        densities.append(density)
        errors.append(error)
    return densities, errors


class Exchange:
    """DEFT's algorithm 1 for workers that take turns; `g` is the gradient of one of them, then the mean."""

    def __init__(self, model: nn.Module, g: Tensor, sparsifiers: list[Sparsifier]) -> None:
        layers = torch.tensor([0, *(p.numel() for p in in_order(model))]).cumsum(0)
        self.g, self.sparsifiers = g, sparsifiers
        self.bounds = sparsifiers[0].cut(layers, WORKERS)
        self.acc = torch.zeros(WORKERS, g.numel())
        self.norms: list[Tensor] = []
        self.t = 0

    def take_in(self, rank: int) -> None:
        """Compute acc = e + g (line 5)."""
        self.norms.append(kernels.accumulate(self.acc[rank], self.g, self.bounds))

    def combine(self) -> tuple[float, float]:
        """Do lines 6 to 12, and return density and error."""
        said: list[Tensor] = []
        turns = sorted(range(WORKERS), key=lambda rank: (rank - self.t) % WORKERS)
        selected = {rank: self._selected(rank, said) for rank in turns}
        joint = joint_indices(list(selected.values()))
        self._adapt([selected[rank].numel() for rank in range(WORKERS)])
        self.g[joint] = self.acc[:, joint].mean(0)
        self.acc[:, joint] = 0
        self.norms.clear()
        self.t += 1
        return joint.numel() / self.g.numel(), self.acc.norm(dim=1).mean().item()

    def _adapt(self, counts: list[int]) -> None:
        for sparsifier in self.sparsifiers:
            if isinstance(sparsifier, Adapting):
                sparsifier.adapt(counts, self.t, self.g.numel())

    def _selected(self, rank: int, said: list[Tensor]) -> Tensor:
        accumulated = Accumulated(self.acc[rank], self.bounds, self.norms[rank])
        sparsifier, seat = self.sparsifiers[rank], cast(Communicator, Seat(rank, said))
        return sparsifier.select(accumulated, sparsifier.share(accumulated, self.t, seat))


class Seat:
    """The part of a communicator that a sparsifier uses; the worker that broadcasts has the first turn."""

    size = WORKERS

    def __init__(self, rank: int, said: list[Tensor]) -> None:
        self.rank, self._said = rank, said

    def bcast(self, x: Tensor, root: int) -> Seat:
        if self.rank == root:
            self._said.append(x.clone())
        x.copy_(self._said[0])
        return self

    def wait(self) -> None:
        """Return at once, because the data is already there."""


def started(task: Task) -> nn.Module:
    """Return the initial model, the same for all contestants."""
    torch.manual_seed(SEED)
    return task.build()


def in_order(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters in the library's order, which is backwards."""
    return list(model.parameters())[::-1]


def flat_gradient(model: nn.Module) -> Tensor:
    """Return the gradient of all parameters as one vector of zeros, into which the backward pass adds."""
    g = torch.zeros(sum(p.numel() for p in model.parameters()))
    for p, part in zip(in_order(model), g.split([p.numel() for p in in_order(model)]), strict=True):
        p.grad = part.view_as(p)
    return g


def batches(task: Task, samples: Samples, partition: str, rank: int, epochs: int) -> list[Tensor]:
    """Return the rows of a worker's batches; the order of the samples differs in every epoch."""
    step, chance = WORKERS * task.batch, torch.Generator().manual_seed(SEED)
    count = len(samples.x) // step * step
    labelled = Labelled(len(samples.x), WORKERS, SEED, labels=samples.y.numpy())
    found: list[Tensor] = []
    for epoch in range(epochs):
        if partition == BY_LABEL:
            hand = torch.from_numpy(ByLabel().assign(labelled, rank, epoch)[: count // WORKERS])
        else:
            order = torch.randperm(len(samples.x), generator=chance)[:count]
            hand = order.view(-1, WORKERS, task.batch)[:, rank].flatten()
        found += hand.split(task.batch)
    return found


def first_threshold(task: Task, samples: Samples, model: nn.Module, first: list[Tensor]) -> float:
    """Return the λ with which the hard threshold selects as many elements as Top-k in the first step.

    It is the mean over the workers of the k-th largest magnitude in their first gradients.
    """
    found = []
    for rows in first:
        twin = copy.deepcopy(model)
        g = flat_gradient(twin)
        loss_of(twin(samples.x[rows]), samples.y[rows]).backward()
        found.append(g.abs().topk(wanted(task.density, len(g))).values[-1].item())
    return mean(found)


def loss_of(scores: Tensor, y: Tensor) -> Tensor:
    """Return the loss of one class per image, or of the word after each one of a window."""
    return cross_entropy(scores.flatten(0, -2), y.flatten(), ignore_index=IGNORED)


@torch.no_grad()
def test(model: nn.Module, samples: Samples) -> dict[str, float]:
    model.eval()
    total, right, count = 0.0, 0, 0
    for x, y in zip(samples.test_x.split(250), samples.test_y.split(250), strict=True):
        scores, asked = model(x), int((y != IGNORED).sum())
        total += loss_of(scores, y).item() * asked
        right += int((scores.argmax(-1) == y).sum())
        count += asked
    return {"accuracy": right / count, "test_loss": total / count}


def difference(folder: Path, partition: str, steps: int = WORKERS + 4) -> float:
    """Return the largest relative difference between virtual workers and real ranks.

    It compares densities and errors in the first `steps` of DEFT on MNIST.
    """
    task = TASKS["mnist"]
    samples = task.samples(folder, steps * WORKERS * task.batch)
    workers = [batches(task, samples, partition, rank, 1) for rank in range(WORKERS)]
    real = threads.run(WORKERS, _on_ranks, task, samples, started(task), workers, timeout=600)[0]
    ours = train(task, samples, started(task), SPARSIFIERS[DEFT], workers)
    pairs = zip([*ours[0], *ours[1]], [*real[0], *real[1]], strict=True)
    return max(abs(a / b - 1) for a, b in pairs)


def _on_ranks(
    world: Communicator, task: Task, samples: Samples, start: nn.Module, workers: list[list[Tensor]]
) -> tuple[list[float], list[float]]:
    """Do the same as `train`, by the library's own gradient reduction."""
    model = copy.deepcopy(start)
    sgd = optim.SGD(model.parameters(), lr=task.lr, momentum=task.momentum)
    grad_reduce = hpcsgd.Sparse(SPARSIFIERS[DEFT](task.density))
    optimizer = hpcsgd.DistributedOptimizer(sgd, model, form(world, groups=1), hpcsgd.bsp(grad_reduce))
    steps = workers[world.rank]
    schedule = MultiStepLR(optimizer, [int(part * len(steps)) for part in MILESTONES])
    densities, errors = [], []
    for rows in steps:
        optimizer.zero_grad()
        loss_of(model(samples.x[rows]), samples.y[rows]).backward()
        optimizer.step()
        schedule.step()
        densities.append(optimizer.metrics["density"])
        errors.append(optimizer.metrics["error"])
    return densities, errors


def _of_threshold(threshold: float, _: float) -> Sparsifier:
    return hpcsgd.HardThreshold(threshold)


def _density(values: list[float], asked: float) -> dict[str, Any]:
    return {
        "density": mean(values),
        "ratio": mean(values) / asked,
        "highest_ratio": max(values) / asked,
        "first_ratio": values[0] / asked,
        "densities": thinned(values),
    }


def _error(values: list[float]) -> dict[str, Any]:
    return {"error": mean(values[-max(1, len(values) // LAST) :]), "errors": thinned(values)}


def thinned(values: list[float]) -> list[float]:
    """Return at most `POINTS` values, which are means of neighbors."""
    width = -(-len(values) // POINTS)
    return [float(f"{mean(values[i : i + width]):.5g}") for i in range(0, len(values), width)]
