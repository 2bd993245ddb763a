"""The settings of hierarchical local SGD's sections IV-B and IV-C, on nodes like those of Cori."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hpcsgd.cluster.batch import Allocation
from papers.at_scale import Job

INTERVALS = (2, 4, 8, 16)


def cifar(P: int, every: int = 8, epochs: int = 200, **changed: dict[str, Any]) -> dict[str, Any]:
    """Return the job file of section IV-B.

    The paper does not say when the learning rate falls. Here it falls as in the ResNet paper.
    """
    milestones = {"milestones": [epochs // 2, epochs * 3 // 4]}
    table = {
        "parallel": {"groups": P},
        "data": {"path": "cifar10.h5", "group_batch_size": 128, "transform": "crop_and_flip"},
        "model": {"name": "resnet20"},
        "optimizer": {"lr": 0.1, "arguments": {"momentum": 0.9, "weight_decay": 1e-4}},
        "lr_schedule": {
            "scaling": "linear",
            "warmup_epochs": 5 if P > 1 else 0,
            "name": "MultiStepLR",
            "arguments": milestones,
        },
        "method": {"name": "hierarchical", "sync_every": every},
        "training": {"epochs": epochs},
    }
    return table | changed


def edsr(P: int, **changed: dict[str, Any]) -> dict[str, Any]:
    """Return the job file of section IV-C: Adam, 1200 epochs, the learning rate times √P.

    With 20 patches per image, an epoch has 16,000 patches.
    """
    table = {
        "parallel": {"groups": P},
        "data": {"path": "div2k_x2.h5", "group_batch_size": 16, "arguments": {"patch": 48, "patches": 20}},
        "model": {"name": "edsr", "arguments": {"scale": 2}},
        "optimizer": {"name": "Adam", "lr": 1e-4},
        "lr_schedule": {"scaling": "root", "warmup_epochs": 5 if P > 1 else 0},
        "method": {"name": "hierarchical", "sync_every": 4},
        "training": {"epochs": 1200},
    }
    return table | changed


Table = Callable[[int], dict[str, Any]]


def trainings(name: str, table: Table, groups: Sequence[int], time: str) -> list[Job]:
    """Return one job for each P, with one node per group. In the paper each process had one node."""
    return [Job(f"{name}-P{P}", table(P), Allocation(nodes=P, cpus_per_rank=68, time=time)) for P in groups]


def fixed_jobs() -> list[Job]:
    found = []
    for every in INTERVALS:
        table = partial(cifar, every=every, epochs=10, lr_schedule={"scaling": "none"})
        found += trainings(f"hierarchical-fixed-I{every}", table, (2, 4, 8, 16, 32), "4:00:00")
    return found


def scaling_jobs(name: str, table: Table, P: int, batch: int, most: int) -> list[Job]:
    """Return the jobs of synchronous SGD with the large batch, of the baseline, and of our method.

    With fewer processes than groups, there is only the job of synchronous SGD.
    """
    found = []
    for N in (2**i for i in range(most.bit_length())):
        together = table(1) | {"method": {"name": "bsp"}, "training": {"epochs": 1}}
        together["data"] = {**together["data"], "group_batch_size": batch}
        rivals: dict[str, dict[str, Any]] = {"sync": together}
        if N >= P:
            local = table(P) | {"training": {"epochs": 1}}
            every = {"sync_every": local["method"]["sync_every"]}
            rivals["allreduce"] = local | {"method": {"name": "allreduce_local_sgd", **every}}
            rivals["hierarchical"] = local
        nodes = Allocation(nodes=N, cpus_per_rank=68)
        found += [Job(f"{name}-{who}-N{N}", each, nodes, "bench") for who, each in rivals.items()]
    return found


cifar_jobs = partial(trainings, "hierarchical-cifar10", cifar, (1, 2, 4, 8, 16, 32), "24:00:00")
edsr_jobs = partial(trainings, "hierarchical-div2k", edsr, (1, 2, 4, 8, 16), "3-00:00:00")
figure_5_jobs = partial(scaling_jobs, "hierarchical-figure-5", cifar, 4, 512, 128)
figure_9_jobs = partial(scaling_jobs, "hierarchical-figure-9", edsr, 8, 128, 128)
