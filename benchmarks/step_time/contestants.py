"""The contestants of `step_time.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch.distributed as dist
from torch import nn, optim
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post_local_sgd
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

import hpcsgd
from harness.workloads import Step, Workload, fastest_ddp

EVERY, FRAGMENTS = 8, 4
ALONE, DDP = "compute alone", "DDP"


@dataclass(frozen=True)
class Entry:
    make: Callable[[Workload, hpcsgd.Topology], Step]
    period: int = 1
    """Number of steps after which the same work repeats."""
    lead: int = 0
    """Steps before the first block in addition to the warm-up.

    Communication that begins in a block has to end in it, or part of it would not be timed.
    """


def method(
    make: Callable[[], hpcsgd.Method],
    period: int = 1,
    lead: int = 0,
    *,
    bucket_cap_mb: float | None = None,
    prefetch: bool = False,
) -> Entry:
    """Return an entry for one of our methods with default options."""

    def step(workload: Workload, topology: hpcsgd.Topology) -> Step:
        model = workload.model()
        optimizer = hpcsgd.DistributedOptimizer(
            sgd(model), model, topology, make(), bucket_cap_mb=bucket_cap_mb, overlap_param_gather=prefetch
        )
        return workload.training(model, optimizer)

    return Entry(step, period, lead)


def sgd(model: nn.Module) -> optim.Optimizer:
    """Return SGD without momentum, because many models are in memory at once."""
    return optim.SGD(model.parameters(), lr=1e-3)


def plain(workload: Workload, _: hpcsgd.Topology) -> Step:
    model = workload.model()
    return workload.training(model, sgd(model))


def ddp(bucket_cap_mb: float) -> Entry:
    def step(workload: Workload, _: hpcsgd.Topology) -> Step:
        model = fastest_ddp(workload.model(), bucket_cap_mb)
        return workload.training(model, sgd(model))

    return Entry(step)


def ddp_power_sgd(workload: Workload, _: hpcsgd.Topology) -> Step:
    """Return a step with torch's PowerSGD hook of rank 1, which starts after two steps without it.

    There is only one bucket: with several, the hooks occupy both of gloo's threads and wait for each other
    forever.
    """
    model = fastest_ddp(workload.model(), bucket_cap_mb=1000)
    state = power_sgd.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, power_sgd.powerSGD_hook)
    return workload.training(model, sgd(model))


def periodic_averager(workload: Workload, topology: hpcsgd.Topology) -> Step:
    """Return a step of post-local SGD: DDP's allreduce in groups, `PeriodicModelAverager` over all ranks."""
    groups = [
        dist.new_group(range(g * topology.group_size, (g + 1) * topology.group_size))
        for g in range(topology.num_groups)
    ]
    model = fastest_ddp(workload.model(), 4)
    state = post_local_sgd.PostLocalSGDState(None, groups[topology.group_index], start_localSGD_iter=0)
    model.register_comm_hook(state, post_local_sgd.post_localSGD_hook)
    step = workload.training(model, sgd(model))
    averager = PeriodicModelAverager(period=EVERY, warmup_steps=0)

    def step_and_average() -> None:
        step()
        averager.average_parameters(model.parameters())

    return step_and_average


OURS = {
    "bsp": method(hpcsgd.bsp),
    "bsp, prefetch": method(hpcsgd.bsp, lead=1, prefetch=True),
    "hierarchical(1)": method(lambda: hpcsgd.hierarchical(1)),
    "hierarchical(8)": method(lambda: hpcsgd.hierarchical(EVERY), EVERY),
    "delayed(8)": method(lambda: hpcsgd.delayed(hpcsgd.hierarchical(EVERY), EVERY), EVERY, EVERY - 1),
    "streaming(8)": method(
        lambda: hpcsgd.streaming(hpcsgd.hierarchical(EVERY), FRAGMENTS, EVERY // FRAGMENTS),
        EVERY,
        EVERY // FRAGMENTS - 1,
    ),
}
RIVALS = {
    f"{DDP} 1 MB": ddp(1),
    f"{DDP} 4 MB": ddp(4),
    f"{DDP} 25 MB": ddp(25),
    "PowerSGD hook": Entry(ddp_power_sgd, lead=2),
    "model averager(8)": Entry(periodic_averager, EVERY),
}
if find_spec("torchft"):
    from step_time.fault_tolerant import diloco, local_sgd

    RIVALS |= {
        "torchft LocalSGD(8)": Entry(lambda w, topology: local_sgd(w, topology, EVERY), EVERY),
        "torchft DiLoCo(8)": Entry(lambda w, topology: diloco(w, topology, EVERY), EVERY),
    }
ENTRIES = {ALONE: Entry(plain), **OURS, **RIVALS}
