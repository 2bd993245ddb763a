"""What training and evaluation ask of a task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hpcsgd.errors import UserError


@dataclass(frozen=True)
class Result:
    """Of a whole split: the mean loss, and figures of merit, by their names in `FIGURES`."""

    loss: float
    figures: dict[str, float]


class Task(Protocol):
    """A loss and how good a model is, from what a model makes of samples (its scores) and their y.

    An evaluation adds up tallies of all batches of all ranks, so the result does not depend on how samples
    were divided among them.
    """

    @property
    def at_once(self) -> int:
        """Samples whose scores may be in memory together, where nobody asked for a number."""
        ...

    @property
    def tallied(self) -> int:
        """Numbers in a tally."""
        ...

    @property
    def tokens(self) -> int | None:
        """Of a sample, where it is made of them."""
        ...

    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        """The mean over these samples, to be differentiated."""
        ...

    def tally(self, scores: Tensor, y: Tensor) -> Tensor:
        """Sums over these samples, float64 [tallied]."""
        ...

    def result(self, tally: Tensor) -> Result:
        """What sums over all samples come to."""
        ...

    def require(self, scores: Tensor, x: Tensor, model: str) -> None:
        """Raise `UserError` unless what the model called `model` made of x can be used."""
        ...


def tally_of(loss: Tensor, *others: Tensor | int) -> Tensor:
    """Of these sums, where they were computed."""
    numbers = (x if isinstance(x, Tensor) else loss.new_full((), x, dtype=torch.float64) for x in others)
    return torch.stack([x.double() for x in (loss, *numbers)])


def unfit(model: str, scores: Tensor, x: Tensor, why: str, expected: list[int]) -> UserError:
    """Scores of that shape are of no use."""
    return UserError(
        f"[model]: {model} gives scores of shape {list(scores.shape)} for {len(x)} samples, but {why}: "
        f"expected {expected}",
        key=("model",),
    )
