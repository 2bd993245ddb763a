"""How long a run is: epochs, or so many steps or samples, and then the last epoch may end early.

Steps and samples are counted from the beginning, also where the run goes on with other numbers of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcsgd.config.schema import TrainingSection
from hpcsgd.data import Batches, InjectedBatches


@dataclass(frozen=True)
class Length:
    """Of a whole run, the same on all ranks."""

    epochs: int
    expected: int
    """Steps, if it keeps its number of groups."""
    steps: int | None = None
    """After which it ends, whatever the epoch."""
    samples: int | None = None
    """Of each rank in the last epoch, after which it ends."""

    def over(self, epoch: int, t: int, batches: Batches | InjectedBatches) -> bool:
        """Whether it is complete after so many epochs and steps; `batches` are those left of the epoch."""
        if self.steps is None:
            return epoch >= self.epochs
        return t >= self.steps and not batches.sampler.taken  # or results of the last epoch are missing

    def left(self, epoch: int, t: int, batches: Batches | InjectedBatches) -> int:
        """How many of the `batches` left of this epoch, counted from 0, are to be trained on."""
        if self.steps is not None:
            return min(max(self.steps - t, 0), len(batches))
        if self.samples is not None and epoch + 1 == self.epochs:
            missing = max(self.samples - batches.sampler.taken, 0)
            return min(-(-missing // batches.per_step), len(batches))
        return len(batches)


def length(training: TrainingSection, batches: Batches | InjectedBatches, ranks: int) -> Length:
    """What `training` asks for, where `batches` are those of a whole epoch on one of so many `ranks`.

    Of samples only those count that are dealt to the ranks, not those that groups give each other.
    """
    per_epoch = len(batches)
    if training.steps is not None:
        return Length(-(-training.steps // per_epoch), training.steps, steps=training.steps)
    if training.samples is not None:
        before, last = divmod(-(-training.samples // ranks) - 1, len(batches.sampler))
        last += 1
        expected = before * per_epoch + min(-(-last // batches.per_step), per_epoch)
        return Length(before + 1, expected, samples=last)
    return Length(training.epochs, training.epochs * per_epoch)
