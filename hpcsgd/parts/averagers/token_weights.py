"""Weights of replica groups by the steps and tokens from which they have learned (Decoupled DiLoCo).

A. Douillard et al.: Decoupled DiLoCo, 2026 (arXiv:2604.21428), section 3.2. Since group m last received a
part of the model, it has made c_steps steps with c_tokens tokens. In the next mean of this part it has the
weight w_m, and the mean over M groups is

    w_m = c_tokens · (c_tokens/c_steps)    0 if c_steps = 0
    x̄ = Σ_m w_m·x_m / Σ_m w_m

So a group that has made more steps counts more. With twice the tokens in a step it counts four times as much.

Differences from the paper:

- Each group states its tokens per step once, and c_tokens is c_steps times that number.
- If no group has made a step, all weigh alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hpcsgd.comm import accumulation_dtype


class TokenWeights:
    """The weights of this group, one for each of the model's `parts`, from its steps.

    `tokens_per_step`: the tokens from which the group learns in a step. None: all groups weigh alike.
    """

    def __init__(self, tokens_per_step: float | None = None, parts: int = 1) -> None:
        self.tokens_per_step, self.parts = tokens_per_step, parts
        self._steps = [0] * parts
        """For each part, c_steps."""

    @property
    def own(self) -> list[float]:
        """The weight of this group in the mean of each part; empty if all groups weigh alike."""
        if self.tokens_per_step is None:
            return []
        return [weight(self.tokens_per_step * steps, steps) for steps in self._steps]

    def count_step(self) -> None:
        self._steps = [steps + 1 for steps in self._steps]

    def received(self, part: int) -> None:
        """Record that this group has received `part`, and has nothing left to add to it."""
        self._steps[part] = 0

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs, by name; nothing if all groups weigh alike."""
        return {} if self.tokens_per_step is None else {"local_steps": list(self._steps)}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue from what `state` returned, perhaps for another number of parts."""
        steps: Sequence[int] = saved.get("local_steps", [0])
        self._steps = list(steps) if len(steps) == self.parts else [max(steps)] * self.parts


def weight(tokens: float, steps: int) -> float:
    """Return the weight w_m of a group that has made `steps` steps with `tokens` tokens in all."""
    return tokens * (tokens / steps) if steps else 0.0


def factor_of(weights: Mapping[int, Sequence[float]], group: int, part: int) -> float:
    """Return the factor of the tensors of `group` in `part`, with which their plain mean is the weighted one.

    `weights` has the weights of each group in the mean; a group that is not in it has the factor 1. Equal
    weights give exactly 1.
    """
    if not weights.get(group):
        return 1.0
    of_part = {g: row[part] for g, row in weights.items()}
    total = math.fsum(of_part.values())
    return of_part[group] * len(of_part) / total if total else 1.0


def scaled(tensors: Sequence[Tensor], factor: float) -> Sequence[Tensor]:
    """Return `factor` times `tensors`, in the dtype of sums; the tensors themselves if it is 1.

    With factor 0 the result is 0, even where a tensor is not finite.
    """
    if factor == 1:
        return tensors
    wide = [x.to(accumulation_dtype(x.dtype)) for x in tensors]
    return [x * factor if factor else torch.zeros_like(x) for x in wide]
