"""Torch's own ways to train on several ranks, except the fastest one, which is in `harness/workloads.py`."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post_local_sgd
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from harness.workloads import Step, Workload, fastest_ddp, sgd


def ddp(workload: Workload) -> Step:
    """Return a step by DistributedDataParallel with its default settings."""
    model = workload.model()
    return workload.training(DistributedDataParallel(model), sgd(model))


def ddp_local_sgd(workload: Workload, groups: int, every: int) -> Step:
    """Return torch's own local SGD: DDP's allreduce inside groups, `PeriodicModelAverager` over all ranks."""
    size, rank = dist.get_world_size(), dist.get_rank()
    group_size = size // groups
    subgroups = [dist.new_group(range(g * group_size, (g + 1) * group_size)) for g in range(groups)]
    model = workload.model()
    parallel = fastest_ddp(model)
    state = post_local_sgd.PostLocalSGDState(None, subgroups[rank // group_size], start_localSGD_iter=0)
    parallel.register_comm_hook(state, post_local_sgd.post_localSGD_hook)
    step = workload.training(parallel, sgd(model))
    averager = PeriodicModelAverager(period=every, warmup_steps=0)

    def step_and_average() -> None:
        step()
        averager.average_parameters(model.parameters())

    return step_and_average
