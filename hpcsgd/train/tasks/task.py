"""The interface of a task for training and evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hpcsgd.errors import UserError


@dataclass(frozen=True)
class Result:
    """The mean loss of a whole split, and figures of merit by their names in `FIGURES`."""

    loss: float
    figures: dict[str, float]


class Task(Protocol):
    """A loss and figures of merit, from a model's outputs for samples (scores) and the samples' targets y.

    An evaluation adds up the sums (a tally) of all batches of all ranks. So the result does not depend on
    how samples were divided among ranks.
    """

    @property
    def at_once(self) -> int:
        """The largest number of samples whose scores are in memory together in an evaluation."""
        ...

    @property
    def tallied(self) -> int:
        """The number of entries in a tally."""
        ...

    @property
    def tokens(self) -> int | None:
        """The number of tokens per sample, or None if samples are not made of tokens."""
        ...

    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss over these samples, which is differentiable."""
        ...

    def tally(self, scores: Tensor, y: Tensor) -> Tensor:
        """Return the tally of these samples: sums, float64 [tallied]."""
        ...

    def result(self, tally: Tensor) -> Result:
        """Return the result for a tally that sums all samples of a split."""
        ...

    def require(self, scores: Tensor, x: Tensor, model: str) -> None:
        """Raise `UserError` unless `scores`, of the model called `model` for x, have the right shape."""
        ...


def tally_of(loss: Tensor, *others: Tensor | int) -> Tensor:
    """Return the sums `loss` and `others` as a tally, on the device of `loss`."""
    numbers = (x if isinstance(x, Tensor) else loss.new_full((), x, dtype=torch.float64) for x in others)
    return torch.stack([x.double() for x in (loss, *numbers)])


def unfit(model: str, scores: Tensor, x: Tensor, why: str, expected: list[int]) -> UserError:
    """Return the error for scores that do not have the shape `expected`; `why` describes the data."""
    return UserError(
        f"[model]: {model} gives scores of shape {list(scores.shape)} for {len(x)} samples, but {why}: "
        f"expected {expected}",
        key=("model",),
    )
