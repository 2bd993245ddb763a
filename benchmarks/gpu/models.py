"""The models whose steps are timed on a GPU: a GPT of 124 M parameters and ResNet-50, on random data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim

import hpcsgd
from gpu.section import Setting
from harness.workloads import Step
from hpcsgd.engine.precision import PRECISIONS
from hpcsgd.models import gpt, resnet50
from hpcsgd.train.model_layout import channels_last, compile_regions

TYPES = 50_257
"""Number of different tokens."""
MOMENTS = 2
"""Number of tensors that AdamW keeps for each parameter."""


@dataclass(frozen=True)
class Subject:
    """A model with its batch, and how it is computed."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    device: torch.device
    precision: str = "bf16"
    compiled: bool = False
    images: bool = False
    """True if channels come last."""

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        with self.device:  # on the host this takes seconds with one thread
            model = self.make()
        if self.images:
            channels_last(model)
        if self.compiled:
            options: Mapping[str, Any] = {} if self.device.type == "cuda" else {"backend": "aot_eager"}
            compile_regions(model, **options)
        return model

    def training(self, model: nn.Module, optimizer: optim.Optimizer) -> Step:
        """Return a function that makes one training step."""
        x, y = (each.to(self.device) for each in self.batch())
        loss, precision = nn.CrossEntropyLoss(), PRECISIONS[self.precision](self.device.type)

        def step() -> None:
            optimizer.zero_grad()
            with precision.computing():
                found = model(x)
                value = loss(found.flatten(0, -2), y.flatten())
            value.backward()
            optimizer.step()

        return step

    def plain(self) -> Step:
        """Return a step in plain torch."""
        model = self.model()
        return self.training(model, adamw(model))

    def ours(self, topology: hpcsgd.Topology, method: hpcsgd.Method) -> Step:
        model = self.model()
        return self.training(model, hpcsgd.DistributedOptimizer(adamw(model), model, topology, method=method))


def adamw(model: nn.Module) -> optim.Optimizer:
    return optim.AdamW(model.parameters(), lr=1e-4)


def subjects(setting: Setting) -> list[Subject]:
    """Return the models, the most important first.

    Batches are so large that the GPU, not the host, limits a step.
    """
    device = setting.device
    preset, batch, length = setting.of(("small", 16, 1024), ("small", 8, 1024), (None, 2, 16))
    types = setting.of(TYPES, TYPES, 50)
    images, size = setting.of((256, 224), (64, 224), (2, 32))
    of_gpt: dict[str, Any] = {
        "make": lambda: gpt(types, preset),
        "batch": lambda: tokens(types, batch, length),
        "device": device,
    }
    return [
        Subject("GPT 124M, bf16", **of_gpt),
        Subject("GPT 124M, bf16, compiled", compiled=True, **of_gpt),
        Subject(
            "ResNet-50, bf16, channels last", resnet50, lambda: pictures(images, size), device, images=True
        ),
    ]


def tokens(types: int, batch: int, length: int) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(types, (batch, length + 1), generator=torch.Generator().manual_seed(1))
    return drawn[:, :-1], drawn[:, 1:]


def pictures(count: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(1000, (count,), generator=generator)
    return torch.randn(count, 3, size, size, generator=generator), labels
