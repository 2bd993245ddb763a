"""One training of `slow_group.py` on the ranks of an MPI job; a rank is a group."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import optim

import hpcsgd
from bytes_at_quality import training as by_bytes
from bytes_at_quality.training import Text, judge, loss_of
from harness import WallClock
from harness.mpi import Together
from hpcsgd.models import gpt
from hpcsgd.train.process import keep_freed_memory
from late_accuracy.training import rate
from slow_group.contestants import CONTESTANTS, Training

LR, BETAS, DECAY = 8e-3, (0.9, 0.99), 0.1
"""AdamW inside a group. This rate was the best of DiLoCo in `bytes_at_quality.py`."""


@dataclass(frozen=True)
class Setting:
    """The settings that all trainings have in common."""

    sizes: by_bytes.Setting
    """The model, the windows and what is judged."""
    steps: int
    """Steps of each group in the training in which groups wait for each other."""
    fast: float
    """Seconds of a step of a fast group."""
    slow: float
    """Seconds of a step of the slow group, the last one."""
    batch: int = 2
    """Number of windows in a step of a group."""

    @property
    def seconds(self) -> float:
        """Seconds of the training in which groups wait for each other, without its messages."""
        return self.steps * self.slow


FULL = Setting(by_bytes.FULL, steps=1024, fast=0.02, slow=0.08)
QUICK = Setting(by_bytes.QUICK, steps=64, fast=0.005, slow=0.02)


def read(path: Path, setting: Setting) -> Text:
    return by_bytes.read(path, setting.sizes)


class Group:
    """The group of this rank in one training."""

    def __init__(self, setting: Setting, text: Text, training: Training, topology: hpcsgd.Topology) -> None:
        torch.set_num_threads(1)
        keep_freed_memory()
        torch.manual_seed(training.seed)
        sizes, known = setting.sizes, CONTESTANTS[training.who]
        self._setting, self._text, self._topology = setting, text, topology
        self._chance = torch.Generator().manual_seed(training.seed * topology.world_size + topology.rank)
        self._model = gpt(256, width=sizes.width, layers=sizes.layers, heads=sizes.heads)
        inner = optim.AdamW(self._model.parameters(), lr=LR, betas=BETAS, weight_decay=DECAY)
        self._optimizer = hpcsgd.DistributedOptimizer(
            inner, self._model, topology, known.method(training.settings)
        )
        self._waits = known.waits
        self._seconds = training.share * setting.seconds
        self._pace = setting.slow if topology.rank == topology.world_size - 1 else setting.fast
        self._late = 0

    def train(self) -> dict[str, Any]:
        """Train, and return the seconds of the slowest group, the loss on the test split, and the steps."""
        together = Together()
        together.meet()
        clock, t = WallClock(), 0
        while not self._is_over(elapsed := clock.stop(), t):
            self._step(LR * rate(self._part(elapsed, t)))
            t += 1
        self._optimizer.method.state_dict()  # waits for pending averages
        seconds = together.slowest(clock.stop())
        losses = self._topology.world.gather_objects((*self._losses(), t, self._late))
        held_out, test, steps, late = zip(*losses, strict=True)
        return {
            "seconds": seconds, "held_out_loss": sum(held_out) / len(losses),
            "test_loss": sum(test) / len(losses), "steps": list(steps), "late_steps": sum(late),
        }  # fmt: skip

    def _is_over(self, elapsed: float, t: int) -> bool:
        """Return whether the group ends here; one that does not wait ends after a synchronization."""
        if self._waits:
            return t == self._setting.steps
        return elapsed >= self._seconds and "staleness" in self._optimizer.metrics

    def _part(self, elapsed: float, t: int) -> float:
        """Return the part of the training after this step; it is the same on all ranks in the first step."""
        if self._waits:
            return (t + 1) / self._setting.steps
        return max(elapsed, self._setting.fast) / self._seconds

    def _step(self, lr: float) -> None:
        """Compute a step, which takes as long as this group's steps do, and update."""
        clock = WallClock()
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        rows = torch.randint(self._text.held_out.start, (self._setting.batch,), generator=self._chance)
        self._optimizer.zero_grad()
        loss_of(self._model, self._text.x[rows], self._text.y[rows]).backward()
        left = self._pace - clock.stop()
        self._late += left < 0
        time.sleep(max(left, 0.0))
        self._optimizer.step()

    def _losses(self) -> tuple[float, float]:
        """Return the losses on this rank's share of the text held out, and of the test split."""
        text, share = self._text, slice(self._topology.rank, None, self._topology.world_size)
        with self._optimizer.averaged_model():
            return (
                judge(self._model, text.x[text.held_out][share], text.y[text.held_out][share]),
                judge(self._model, text.test_x[share], text.test_y[share]),
            )
