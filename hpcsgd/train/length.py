"""The length of a run: a number of epochs, steps, samples or tokens.

With steps, samples or tokens the last epoch may end early. These numbers count from the beginning of the run,
even if the run is resumed with another number of ranks.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from hpcsgd.config.schema import TrainingSection
from hpcsgd.data import Batches, InjectedBatches
from hpcsgd.errors import UserError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Length:
    """The length of a whole run, the same on all ranks."""

    epochs: int
    expected: int
    """Number of steps of the whole run, if its number of groups does not change."""
    steps: int | None = None
    """The step after which the run ends, whatever the epoch."""
    samples: int | None = None
    """Samples of each rank in the last epoch, after which the run ends."""

    def over(self, epoch: int, t: int, batches: Batches | InjectedBatches, *, cut: bool) -> bool:
        """Return whether the run is complete after `epoch` whole epochs and t steps.

        `batches` are the rest of the next epoch. `cut` is True if that epoch has been ended early already.
        """
        if self.steps is None and epoch >= self.epochs:
            return True
        known = cut or (self.steps is not None and not batches.sampler.taken)
        return known and not self.left(epoch, t, batches)

    def left(self, epoch: int, t: int, batches: Batches | InjectedBatches) -> int:
        """Return the number of further steps in this epoch.

        The run has made t steps. `batches` are the rest of the epoch with number `epoch`, from 0.
        """
        if self.steps is not None:
            return min(max(self.steps - t, 0), len(batches))
        if self.samples is not None and epoch + 1 == self.epochs:
            missing = max(self.samples - batches.sampler.taken, 0)
            return min(-(-missing // batches.per_step), len(batches))
        return len(batches)

    def expected_from(self, epoch: int, t: int, batches: Batches | InjectedBatches, per_epoch: int) -> int:
        """Return the number of steps of the whole run, from its beginning to its end.

        The run has made t steps. `batches` are the rest of the epoch with number `epoch`, from 0. Each later
        epoch has `per_epoch` batches.
        """
        if self.steps is not None:
            return self.steps
        later = self.epochs - epoch - 1
        if later < 0:
            return t
        t += self.left(epoch, t, batches)
        if later == 0 or self.samples is None:
            return t + later * per_epoch
        return t + (later - 1) * per_epoch + min(-(-self.samples // batches.per_step), per_epoch)


def length(
    training: TrainingSection, batches: Batches | InjectedBatches, ranks: int, tokens: int | None = None
) -> Length:
    """Return the length of the run that `training` asks for.

    `batches` are those of a whole epoch on one of `ranks` ranks. `tokens` is the number of tokens per
    sample, or None. Only samples that are assigned to ranks count, not those that groups share.
    """
    per_epoch = len(batches)
    if training.steps is not None:
        return Length(-(-training.steps // per_epoch), training.steps, steps=training.steps)
    samples = training.samples
    if training.tokens is not None:
        samples = -(-training.tokens // _made_of(tokens, "tokens"))
    if samples is not None:
        before, last = divmod(-(-samples // ranks) - 1, len(batches.sampler))
        last += 1
        expected = before * per_epoch + min(-(-last // batches.per_step), per_epoch)
        return Length(before + 1, expected, samples=last)
    assert training.epochs is not None, "the schema asks for a length"
    return Length(training.epochs, training.epochs * per_epoch)


def warn_of_few(samples: int, batch_size: int) -> None:
    """Warn if a group has fewer samples in an epoch than its batch size."""
    if samples < batch_size:
        log.warning(
            "[data] group_batch_size = %d: a group has %d samples an epoch, which are one step",
            batch_size,
            samples,
        )


def tested(training: TrainingSection, samples: int, tokens: int | None) -> int:
    """Return how many of the test `samples` an evaluation uses. A sample has `tokens` tokens, or None."""
    if training.eval_tokens is None:
        return samples
    return min(-(-training.eval_tokens // _made_of(tokens, "eval_tokens")), samples)


def _made_of(tokens: int | None, key: str) -> int:
    if tokens is None:
        raise UserError(
            f"[training] {key}: the samples of this dataset file are not made of tokens",
            key=("training", key),
        )
    return tokens
