"""A model and a transform that record the random numbers they draw."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Generator, Tensor, nn

drawn: list[tuple[float, ...]] = []
"""Per step: the draw of `transform` from its generator, then the model's from torch, numpy and Python."""


def transform(x: Tensor, generator: Generator) -> Tensor:
    drawn.append((torch.rand((), generator=generator).item(),))
    return x


class Drawing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if drawn:  # not when the model is tried out
            drawn[-1] += (torch.rand(()).item(), np.random.random(), random.random())
        return x


def model() -> nn.Module:
    return nn.Sequential(Drawing(), nn.Flatten(), nn.Linear(36, 10))


def draws(seed: int, count: int) -> list[tuple[float, ...]]:
    """Return the first `count` draws of a rank that began with this seed."""
    own, shared = Generator().manual_seed(seed), Generator().manual_seed(seed)
    arrays, python = np.random.RandomState(seed), random.Random(seed)

    def once() -> tuple[float, ...]:
        theirs = torch.rand((), generator=own).item(), torch.rand((), generator=shared).item()
        return *theirs, arrays.random_sample(), python.random()

    return [once() for _ in range(count)]
