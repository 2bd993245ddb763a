"""Who runs in `step_overhead.py`: one training step each, of the same model on the same data in memory.

Every contestant has its own copy of the model, made from the same seed, and a plain SGD with momentum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post_local_sgd
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

import hpcsgd
from hpcsgd.models import mlp, resnet20

Step = Callable[[], None]


@dataclass(frozen=True)
class Workload:
    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    """Of the batch that one rank takes in one step."""

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make()

    def batch(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        labels = torch.randint(10, self.shape[:1], generator=generator)
        return torch.randn(self.shape, generator=generator), labels


EVERY = 8
WORKLOADS = (
    Workload("ResNet-20", resnet20, (32, 3, 32, 32)),
    Workload("MLP 25M", lambda: mlp(2048, hidden=(2048,) * 6), (128, 2048)),
)


def plain(workload: Workload) -> Step:
    """The torch loop on each rank alone: no communication."""
    model = workload.model()
    return _step(workload, model, _sgd(model))


def ours(workload: Workload, job: hpcsgd.Job, method: hpcsgd.Method) -> Step:
    model = workload.model()
    return _step(workload, model, hpcsgd.DistributedOptimizer(_sgd(model), model, job, method=method))


def ddp(workload: Workload) -> Step:
    """DistributedDataParallel as it comes."""
    model = workload.model()
    return _step(workload, DistributedDataParallel(model), _sgd(model))


def ddp_tuned(workload: Workload) -> Step:
    """Without rank 0's buffers before each forward pass and without copying gradients back: its fastest."""
    model = workload.model()
    parallel = DistributedDataParallel(model, forward_sync_buffers=False, gradient_as_bucket_view=True)
    return _step(workload, parallel, _sgd(model))


def ddp_local_sgd(workload: Workload, groups: int, every: int) -> Step:
    """Torch's own local SGD: DDP's allreduce inside groups, `PeriodicModelAverager` over all ranks."""
    size, rank = dist.get_world_size(), dist.get_rank()
    group_size = size // groups
    subgroups = [dist.new_group(range(g * group_size, (g + 1) * group_size)) for g in range(groups)]
    model = workload.model()
    parallel = DistributedDataParallel(model, forward_sync_buffers=False, gradient_as_bucket_view=True)
    state = post_local_sgd.PostLocalSGDState(None, subgroups[rank // group_size], start_localSGD_iter=0)
    parallel.register_comm_hook(state, post_local_sgd.post_localSGD_hook)
    step = _step(workload, parallel, _sgd(model))
    averager = PeriodicModelAverager(period=every, warmup_steps=0)

    def step_and_average() -> None:
        step()
        averager.average_parameters(model.parameters())

    return step_and_average


def _sgd(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def _step(workload: Workload, model: nn.Module, optimizer: optim.Optimizer) -> Step:
    images, labels = workload.batch()
    loss = nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad()
        loss(model(images), labels).backward()
        optimizer.step()

    return step
