"""Models and transforms that the job files of these tests name."""

from __future__ import annotations

import random
import time

import numpy as np
import torch
from torch import Generator, Tensor, nn, optim
from torch.optim import lr_scheduler


def steady(inputs: int = 64, *, norm: bool = True) -> nn.Module:
    """Return the same model on every thread; the threads share torch's global generator."""
    between = nn.BatchNorm1d(8) if norm else nn.Identity()
    net = nn.Sequential(nn.Flatten(), nn.Linear(inputs, 8), between, nn.ReLU(), nn.Linear(8, 10))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / 4)
    return net


def chancy() -> nn.Module:
    return nn.Sequential(steady(), nn.Dropout(0.2))


class Drop(nn.Module):
    """Dropout with the device's own generator; on the test device, torch's dropout uses the host's."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand(x.shape, device=x.device).gt(0.2)


def dropping(inputs: int, *, norm: bool) -> nn.Module:
    return nn.Sequential(steady(inputs, norm=norm), Drop())


def noisy(x: Tensor, generator: Generator) -> Tensor:
    """Add noise from the given generator and from the global ones of torch, Python and numpy."""
    noise = torch.rand((), generator=generator) + torch.rand(()) + random.random() + np.random.random()
    return x + 0.1 * noise


seen: dict[int, list[Tensor]] = {}
"""All inputs of `noted`, by rank."""


def noted(x: Tensor, generator: Generator) -> Tensor:
    """Record the input; rank 1 is slow."""
    rank = generator.initial_seed() - 2
    seen.setdefault(rank, []).append(x)
    if rank == 1:
        time.sleep(0.1)  # long compared with delays of a busy machine
    return x


def sequence(optimizer: optim.Optimizer) -> lr_scheduler.LRScheduler:
    first = lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=2)
    return lr_scheduler.SequentialLR(optimizer, [first, lr_scheduler.MultiStepLR(optimizer, [1, 3])], [3])
