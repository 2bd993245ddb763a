"""The contestants of `sharded.py`. All update by AdamW, and torch shards each layer by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import hpcsgd
from harness.workloads import Step, Workload
from step_time.contestants import EVERY, Entry

ALONE, HSDP, BSP, LOCAL = "groups alone", "torch HSDP", "bsp", f"hierarchical({EVERY})"
AFTER = "bsp, after backward"


def sharded(workload: Workload, mesh: DeviceMesh) -> nn.Module:
    model = workload.model()
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def adamw(model: nn.Module) -> optim.Optimizer:
    return optim.AdamW(model.parameters(), lr=1e-3)


def torch_alone(workload: Workload, topology: hpcsgd.Topology) -> Step:
    """Train every group for itself, without messages between groups; all other contestants do this too."""
    model = sharded(workload, topology.mesh()["shard"])
    return workload.training(model, adamw(model))


def torch_hybrid(workload: Workload, topology: hpcsgd.Topology) -> Step:
    """Shard within groups and replicate across them: torch reduces gradients over both, in every step."""
    model = sharded(workload, topology.mesh())
    return workload.training(model, adamw(model))


def method(make: Callable[[], hpcsgd.Method], period: int = 1, **options: Any) -> Entry:
    """Return the entry of one of our methods, with defaults except for `options`."""

    def step(workload: Workload, topology: hpcsgd.Topology) -> Step:
        model = sharded(workload, topology.mesh()["shard"])
        optimizer = hpcsgd.DistributedOptimizer(adamw(model), model, topology, make(), **options)
        return workload.training(model, optimizer)

    return Entry(step, period)


ENTRIES = {
    ALONE: Entry(torch_alone),
    HSDP: Entry(torch_hybrid),
    BSP: method(hpcsgd.bsp),
    AFTER: method(hpcsgd.bsp, overlap_grad_reduce=False),
    LOCAL: method(lambda: hpcsgd.hierarchical(EVERY), EVERY),
}
