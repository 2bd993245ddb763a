"""The evaluation of the averaged model on the test data."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from hpcsgd.comm import phase
from hpcsgd.core.generators import generators_state, load_generators_state
from hpcsgd.train.tasks import task_of
from hpcsgd.train.training_setup import TrainingSetup

BATCH = 256
"""Maximum number of samples per batch."""


@dataclass(frozen=True)
class Score:
    """The result of an evaluation of the averaged model.

    `loss` is the mean over the tested samples. `figures` has the task's figures of merit by name, such as
    the accuracy. `distance` is the mean distance D of the groups' models from the averaged model. `seconds`
    is the duration of the evaluation.
    """

    loss: float
    figures: dict[str, float]
    distance: float
    seconds: float


@torch.no_grad()
def evaluate(parts: TrainingSetup) -> Score:
    """Return the score of the mean of all groups' models and batch-norm statistics; collective.

    The random generators are afterwards as before, so that training does not depend on evaluations.
    """
    generators = generators_state(parts.device)
    started = time.perf_counter()
    world, task = parts.optimizer.topology.world, parts.task
    total = torch.zeros(task.tallied, dtype=torch.float64, device=parts.device)
    with parts.optimizer.averaged_model() as D:
        parts.model.eval()
        mine = _spread(parts.tested, len(parts.test))[world.rank :: world.size]
        for rows in mine.split(min(BATCH, task.at_once)):
            x, y = parts.test.collate(parts.test.__getitems__(rows.tolist()))
            x, y = parts.deliver(x), parts.deliver(y)
            with parts.precision.computing():
                total += task.tally(parts.model(x), y)
        parts.model.train()
    load_generators_state(generators, parts.device)
    sums = total.cpu()
    with phase("eval"):
        world.allreduce(sums).wait()
    result = task_of(parts.test).result(sums)
    return Score(result.loss, result.figures, D, time.perf_counter() - started)


def _spread(count: int, of: int) -> Tensor:
    """Return `count` indices spread evenly over `of` samples, the same every time."""
    return torch.arange(count, device="cpu") * of // count
