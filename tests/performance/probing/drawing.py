"""A model and a transform that note what chance they have."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Generator, Tensor, nn

drawn: list[tuple[float, ...]] = []
"""What `transform` had from its generator, and the model after it from torch, numpy and Python."""


def transform(x: Tensor, generator: Generator) -> Tensor:
    drawn.append((torch.rand((), generator=generator).item(),))
    return x


class Drawing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if drawn:  # not when the model is tried
            drawn[-1] += (torch.rand(()).item(), np.random.random(), random.random())
        return x


def model() -> nn.Module:
    return nn.Sequential(Drawing(), nn.Flatten(), nn.Linear(36, 10))


def draws(seed: int, count: int) -> list[tuple[float, ...]]:
    """The first `count` of whoever began with this seed."""
    own, shared = Generator().manual_seed(seed), Generator().manual_seed(seed)
    arrays, python = np.random.RandomState(seed), random.Random(seed)

    def once() -> tuple[float, ...]:
        theirs = torch.rand((), generator=own).item(), torch.rand((), generator=shared).item()
        return *theirs, arrays.random_sample(), python.random()

    return [once() for _ in range(count)]
