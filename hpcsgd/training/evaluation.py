"""How good the averaged model is on the test data."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy

from hpcsgd.training.assembly import Assembly
from hpcsgd.transport import phase

BATCH = 256


@dataclass(frozen=True)
class Score:
    """Mean cross-entropy and the share of right answers, over all test samples, of the mean model; and the
    groups' distance D from it."""

    loss: float
    accuracy: float
    distance: float
    seconds: float


@torch.no_grad()
def evaluate(parts: Assembly) -> Score:
    """Test the mean of all groups' models, with the mean of all batch-norm statistics; collective."""
    started = time.perf_counter()
    world = parts.optimizer.job.world
    sums = torch.zeros(3, dtype=torch.float64)
    with parts.optimizer.averaged() as D:
        parts.model.eval()
        for rows in torch.arange(len(parts.test))[world.rank :: world.size].split(BATCH):
            x, y = parts.test.collate(parts.test.__getitems__(rows.tolist()))
            scores = parts.model(x)
            sums[0] += cross_entropy(scores, y, reduction="sum")
            sums[1] += (scores.argmax(1) == y).sum()
            sums[2] += len(y)
        parts.model.train()
    with phase("evaluation"):
        world.allreduce(sums).wait()
    loss, right, count = sums.tolist()
    return Score(loss / count, right / count, D, time.perf_counter() - started)
