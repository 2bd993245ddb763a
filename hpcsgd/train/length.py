"""How long a run is: epochs, or so many steps, samples or tokens, and then the last epoch may end early.

Steps, samples and tokens are counted from the beginning, also where the run goes on with other numbers of
ranks.
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
    """Of a whole run, the same on all ranks."""

    epochs: int
    expected: int
    """Steps, if it keeps its number of groups."""
    steps: int | None = None
    """After which it ends, whatever the epoch."""
    samples: int | None = None
    """Of each rank in the last epoch, after which it ends."""

    def over(self, epoch: int, t: int, batches: Batches | InjectedBatches, *, cut: bool) -> bool:
        """Whether it is complete after so many epochs and steps; `batches` are those left of the epoch.

        `cut`: the results of what was done of that epoch are known.
        """
        if self.steps is None and epoch >= self.epochs:
            return True
        known = cut or (self.steps is not None and not batches.sampler.taken)
        return known and not self.left(epoch, t, batches)

    def left(self, epoch: int, t: int, batches: Batches | InjectedBatches) -> int:
        """How many of the `batches` left of this epoch, counted from 0, are to be trained on."""
        if self.steps is not None:
            return min(max(self.steps - t, 0), len(batches))
        if self.samples is not None and epoch + 1 == self.epochs:
            missing = max(self.samples - batches.sampler.taken, 0)
            return min(-(-missing // batches.per_step), len(batches))
        return len(batches)

    def expected_from(self, epoch: int, t: int, batches: Batches | InjectedBatches, per_epoch: int) -> int:
        """Steps of the whole run, where it has come to `epoch` and `t`, `batches` are left of the epoch, and
        later ones have `per_epoch` of them."""
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
    """What `training` asks for, where `batches` are those of a whole epoch on one of so many `ranks`, and a
    sample is made of so many `tokens`, if of any.

    Of samples only those count that are dealt to the ranks, not those that groups give each other.
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
    """Of a group, in an epoch."""
    if samples < batch_size:
        log.warning(
            "[data] group_batch_size = %d: a group has %d samples an epoch, which are one step",
            batch_size,
            samples,
        )


def tested(training: TrainingSection, samples: int, tokens: int | None) -> int:
    """How many of the test data's `samples` an evaluation is of; each is made of `tokens`, if of any."""
    if training.eval_tokens is None:
        return samples
    return min(-(-training.eval_tokens // _made_of(tokens, "eval_tokens")), samples)


def _made_of(tokens: int | None, key: str) -> int:
    if tokens is None:
        raise UserError(
            f"[training] {key}: the samples of this store are not made of tokens", key=("training", key)
        )
    return tokens
