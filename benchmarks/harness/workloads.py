"""Models whose training steps are timed, on data in memory.

Every contestant has its own copy of a model, made from the same seed, and plain SGD with momentum.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel

import hpcsgd
from hpcsgd.models import mlp, resnet20

Step = Callable[[], None]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Workload:
    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    """The shape of the inputs that one rank takes in one step."""
    device: torch.device = CPU

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make().to(self.device)

    def batch(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        labels = torch.randint(10, self.shape[:1], generator=generator)
        return torch.randn(self.shape, generator=generator).to(self.device), labels.to(self.device)

    def training(self, model: nn.Module, optimizer: optim.Optimizer) -> Step:
        """Return a function that makes one training step."""
        images, labels = self.batch()
        loss = nn.CrossEntropyLoss()

        def step() -> None:
            optimizer.zero_grad()
            loss(model(images), labels).backward()
            optimizer.step()

        return step


RESNET20 = Workload("ResNet-20", resnet20, (32, 3, 32, 32))
WORKLOADS = (RESNET20, Workload("MLP 25M", lambda: mlp(2048, hidden=(2048,) * 6), (128, 2048)))


def sgd(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def plain(workload: Workload) -> Step:
    """Return a step of the plain torch loop on each rank alone, without communication."""
    model = workload.model()
    return workload.training(model, sgd(model))


def ours(workload: Workload, topology: hpcsgd.Topology, method: hpcsgd.Method) -> Step:
    model = workload.model()
    return workload.training(model, hpcsgd.DistributedOptimizer(sgd(model), model, topology, method=method))


def ddp_tuned(workload: Workload) -> Step:
    """Return a step of DistributedDataParallel with its fastest options."""
    model = workload.model()
    return workload.training(fastest_ddp(model), sgd(model))


def fastest_ddp(model: nn.Module, bucket_cap_mb: float = 25) -> DistributedDataParallel:
    """Wrap `model` in DistributedDataParallel with its fastest options.

    It neither broadcasts rank 0's buffers before each forward pass nor copies gradients back. The argument
    for buffers has another name in older versions of torch.
    """
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {buffers: False, "bucket_cap_mb": bucket_cap_mb}
    return DistributedDataParallel(model, gradient_as_bucket_view=True, **options)
