"""Networks of equal layers that either compute or sleep."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from harness.workloads import Workload

WIDTH, CLASSES = 707, 10
LAYERS = {"6 M": 12, "25 M": 50}
"""The number of layers of WIDTH² parameters, by the number of parameters of the model."""
FORWARD = 1 / 3
"""The fraction of computing that the forward pass takes."""
SAMPLES = 128
"""The samples of a rank and step with real computing."""
KINDS = ("emulated", "real")


@dataclass
class Compute:
    """The seconds that a step sleeps. They may change between two steps."""

    seconds: float

    def without(self, step: Callable[[], None]) -> Callable[[], None]:
        """Return the same step without sleeping, so that communication cannot be hidden behind it."""

        def bare() -> None:
            usual, self.seconds = self.seconds, 0.0
            step()
            self.seconds = usual

        return bare


class _Sleep(torch.autograd.Function):
    """Returns `x` after a sleep. The gradient of the weight is the same in every step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _: Tensor, gradient: Tensor, seconds: Callable[[], float]) -> Tensor:
        ctx.gradient, ctx.seconds = gradient, seconds
        time.sleep(FORWARD * seconds())
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        time.sleep((1 - FORWARD) * ctx.seconds())
        return grad_outputs[0], ctx.gradient, None, None


class Sleeping(nn.Module):
    """A layer that sleeps for the fraction `part` of a step's computing time."""

    def __init__(self, gradient: Tensor, compute: Compute, part: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros_like(gradient))
        self._gradient, self._compute, self._part = gradient, compute, part

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(x, self.weight, self._gradient, lambda: self._compute.seconds * self._part)


def workload(model: str, kind: str, compute: Compute) -> Workload:
    """Return the workload of one of LAYERS with one of KINDS of computing."""
    if kind == "real":
        return Workload(model, partial(_computing, LAYERS[model]), (SAMPLES, WIDTH))
    return Workload(model, partial(_sleeping, LAYERS[model], compute), (1, CLASSES))


def _computing(layers: int) -> nn.Module:
    hidden = [each for _ in range(layers) for each in (nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, CLASSES))


def _sleeping(layers: int, compute: Compute) -> nn.Module:
    gradient = 1e-3 * torch.randn(WIDTH, WIDTH)
    return nn.Sequential(*(Sleeping(gradient, compute, 1 / layers) for _ in range(layers)))
