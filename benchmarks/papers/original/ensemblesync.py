"""EnsembleSync: ResNet-10 on CIFAR-10, two workers with a GPU each, as its section 4 has them."""

from __future__ import annotations

from typing import Any

from hpcsgd.cluster.batch import Allocation
from papers.at_scale import Job
from papers.beside.ensemblesync import BUDGET

WORKERS = 2
PLACE = Allocation(nodes=WORKERS, gpus_per_node=1, time="12:00:00")
PER_EPOCH = 37_500 // 128
"""Steps of a worker; a tenth of them lie between two meetings."""
GROUPS = {"NUM_GROUPS": str(WORKERS)}


def table(method: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """A worker has three quarters of the samples, half of all in common. Rates are not in the paper."""
    common: dict[str, Any] = {
        "parallel": {"groups": WORKERS},
        "data": {
            "path": "cifar10.h5",
            "group_batch_size": 128,
            "transform": "crop_and_flip",
            "overlap_share": 0.75,
        },
        "model": {"name": "resnet10"},
        "optimizer": {"lr": 0.1, "arguments": {"momentum": 0.9, "weight_decay": 5e-4}},
        "lr_schedule": {"scaling": "none", "name": "CosineAnnealingLR", "arguments": {"T_max": 100}},
        "method": method,
        "training": {"epochs": 100},
    }
    return common | changed


def ensemble(name: str, **changed: Any) -> Job:
    return Job(
        name,
        table({"name": "ensemble_sync", "sync_every": PER_EPOCH // 10}, **changed),
        PLACE,
        "ensemble",
        GROUPS,
    )


def normal_jobs() -> list[Job]:
    """Section 4.2; sync SGD as bsp of two groups, which is one model and the same samples."""
    optimizer = table({})["optimizer"] | {"natural_gradient": {"rank": 20}}
    return [
        Job("ensemblesync-sync", table({"name": "bsp"}), PLACE),
        Job("ensemblesync-async", table({"name": "async_sgd"}), PLACE),
        ensemble("ensemblesync-ensemble", optimizer=optimizer),
    ]


def faulty_jobs() -> list[Job]:
    """Section 4.3: kill worker 1 for 240 s at epoch 26 by hand, and slow down worker 2 in epochs 5 to 15."""
    return [ensemble("ensemblesync-faulty", rebalance={"resource": "samples", "total": BUDGET})]
