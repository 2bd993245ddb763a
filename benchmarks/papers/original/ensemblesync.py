"""The setting of EnsembleSync's section 4: ResNet-10 on CIFAR-10, two workers with one GPU each."""

from __future__ import annotations

from typing import Any

from hpcsgd.cluster.batch import Allocation
from papers.at_scale import Job
from papers.beside.ensemblesync import BUDGET

WORKERS = 2
PLACE = Allocation(nodes=WORKERS, gpus_per_node=1, time="12:00:00")
PER_EPOCH = 37_500 // 128
"""Steps of a worker per epoch. A tenth of them lie between two synchronizations."""
GROUPS = {"NUM_GROUPS": str(WORKERS)}


def table(method: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """Return the contents of a job file.

    A worker sees three quarters of all samples, and the two workers have half of all samples in common. The
    learning rates are not from the paper, which gives none.
    """
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
    """Return the jobs of section 4.2.

    Sync SGD is `bsp` with two groups: both train one model, on the same samples as the other methods.
    """
    optimizer = table({})["optimizer"] | {"natural_gradient": {"rank": 20}}
    return [
        Job("ensemblesync-sync", table({"name": "bsp"}), PLACE),
        Job("ensemblesync-async", table({"name": "async_sgd"}), PLACE),
        ensemble("ensemblesync-ensemble", optimizer=optimizer),
    ]


def faulty_jobs() -> list[Job]:
    """Return the job of section 4.3.

    At epoch 26 kill worker 1 for 240 s, manually. Also slow down worker 2 in epochs 5 to 15.
    """
    return [ensemble("ensemblesync-faulty", rebalance={"resource": "samples", "total": BUDGET})]
