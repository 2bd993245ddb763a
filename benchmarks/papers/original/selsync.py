"""The settings of SelSync's section IV-A: 16 workers with one V100 each, on 4 servers over 5 Gb/s."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import product
from typing import Any

from hpcsgd.cluster.batch import Allocation
from papers.at_scale import Job

WORKERS = 16
NODES = Allocation(nodes=4, ranks_per_node=4, cpus_per_rank=8, gpus_per_node=4, time="1-00:00:00")
LABELLED = Allocation(nodes=5, ranks_per_node=2, cpus_per_rank=8, gpus_per_node=2, time="1-00:00:00")
"""The nodes of ten workers."""


def sgd(lr: float, decay: float) -> dict[str, Any]:
    return {"lr": lr, "arguments": {"momentum": 0.9, "weight_decay": decay}}


def falling(*milestones: int) -> dict[str, Any]:
    return {"scaling": "none", "name": "MultiStepLR", "arguments": {"milestones": list(milestones)}}


MODELS: Mapping[str, dict[str, Any]] = {
    "resnet101": {
        "data": {"path": "cifar10.h5", "group_batch_size": 32, "transform": "crop_and_flip"},
        "model": {"name": "resnet101", "arguments": {"classes": 10, "stem": 3}},
        "optimizer": sgd(0.1, 4e-4), "lr_schedule": falling(110, 150), "training": {"epochs": 170},
    },
    "vgg11": {
        "data": {"path": "cifar100.h5", "group_batch_size": 32, "transform": "crop_and_flip"},
        "model": {"name": "vgg11", "arguments": {"classes": 100}},
        "optimizer": sgd(0.01, 5e-4), "lr_schedule": falling(50, 75), "training": {"epochs": 90},
    },
    "alexnet": {
        "data": {"path": "imagenet.h5", "group_batch_size": 128},
        "model": {"name": "alexnet"},
        "optimizer": {"name": "Adam", "lr": 1e-4}, "lr_schedule": {"scaling": "none"},
        "training": {"epochs": 25},
    },
    "transformer": {
        "data": {"path": "wikitext103.h5", "group_batch_size": 20, "arguments": {"bptt": 35}},
        "model": {"name": "transformer", "arguments": {"types": 267_735}},
        "optimizer": {"lr": 2.0},
        "lr_schedule": {"scaling": "none", "name": "StepLR", "interval": "step",
                     "arguments": {"step_size": 2000, "gamma": 0.8}},
        "training": {"epochs": 4},
    },
}  # fmt: skip
"""Momentum, weight decay, batch sizes and rates are from section IV-A, and epochs from the figures."""
SELDP, DEFDP = {"name": "seldp"}, {"name": "defdp"}
RIVALS: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{f"fedavg-{C:g}-{E:g}": ({"name": "fedavg", "fraction": C, "per_epoch": int(1 / E)}, DEFDP)
       for C in (1.0, 0.5) for E in (0.25, 0.125)},
    **{f"ssp-{s}": ({"name": "ssp", "max_staleness": s}, DEFDP) for s in (100, 200)},
    **{f"selsync-{d:g}": ({"name": "selsync", "delta": d}, SELDP) for d in (0.3, 0.5)},
}  # fmt: skip
"""The method and the partition of each contestant."""


def job(model: str, who: str, method: dict[str, Any], **data: Any) -> Job:
    """Return a job of 16 workers, each of which is a group."""
    table = MODELS[model] | {"parallel": {"groups": WORKERS}, "method": method}
    return Job(f"selsync-{model}-{who}", {**table, "data": {**table["data"], **data}}, NODES)


def synchronous(model: str) -> Job:
    """Return the job of BSP, with all workers in one group."""
    table = MODELS[model] | {"parallel": {"groups": 1}, "method": {"name": "bsp"}}
    batch = WORKERS * table["data"]["group_batch_size"]
    return Job(f"selsync-{model}-bsp", {**table, "data": {**table["data"], "group_batch_size": batch}}, NODES)


def table_1_jobs() -> list[Job]:
    found = [synchronous(model) for model in MODELS]
    for model in MODELS:
        found += [job(model, who, method, partition=part) for who, (method, part) in RIVALS.items()]
    return found


def partition_jobs(aggregates: tuple[str, ...], partitions: tuple[str, ...]) -> list[Job]:
    """Return the jobs of section IV-C or IV-D, with δ = 0.25."""
    found = []
    for model, how, part in product(MODELS, aggregates, partitions):
        method = {"name": "selsync", "delta": 0.25, "aggregate": how}
        found.append(job(model, f"{part}-{how}", method, partition={"name": part}))
    return found


figure_9_jobs = partial(partition_jobs, ("gradients",), ("seldp", "defdp"))
figure_10_jobs = partial(partition_jobs, ("parameters", "gradients"), ("seldp",))


def labelled(model: str, who: str, method: dict[str, Any], **data: Any) -> Job:
    """Return a job of ten workers with one label each (CIFAR-10) or ten labels each (CIFAR-100)."""
    table = MODELS[model] | {"parallel": {"groups": 10}, "method": method}
    shared = {**table["data"], "partition": {"name": "by_label"}, **data}
    return Job(f"selsync-{model}-label-{who}", {**table, "data": shared}, LABELLED)


def figure_12_jobs() -> list[Job]:
    found = []
    for model in ("resnet101", "vgg11"):
        found.append(labelled(model, "fedavg", {"name": "fedavg", "per_epoch": 10}))
        for alpha, beta, delta in ((0.5, 0.5, 0.05), (0.5, 0.5, 0.3), (0.75, 0.75, 0.3)):
            method, shares = {"name": "selsync", "delta": delta}, {"alpha": alpha, "beta": beta}
            found.append(labelled(model, f"{alpha:g}-{beta:g}-{delta:g}", method, injection=shares))
    return found


def figure_1_jobs() -> list[Job]:
    """Return the jobs of figure 1.

    BSP runs for two minutes on each of 1, 2, 4, 8 and 16 workers. FedAvg trains with and without all labels
    on each worker.
    """
    found = []
    for model in MODELS:
        for nodes, each in ((1, 1), (2, 1), (4, 1), (4, 2), (4, 4)):
            table = MODELS[model] | {"parallel": {"groups": 1}, "method": {"name": "bsp"}}
            n = nodes * each
            table["data"] = {**table["data"], "group_batch_size": n * table["data"]["group_batch_size"]}
            place = Allocation(nodes=nodes, ranks_per_node=each, cpus_per_rank=8, gpus_per_node=each)
            found.append(Job(f"selsync-throughput-{model}-{n}", table, place, "bench"))
    for model in ("resnet101", "vgg11"):
        method = {"name": "fedavg", "per_epoch": 10}
        found += [labelled(model, "fedavg", method), job(model, "fedavg-iid", method, partition=DEFDP)]
    return found


def figure_2_jobs() -> list[Job]:
    """Return jobs of two minutes each, with larger and larger batches on one GPU."""
    place = Allocation(gpus_per_node=1, cpus_per_rank=8)
    found = []
    for model in MODELS:
        for times in (1, 2, 4, 8, 16):
            table = MODELS[model] | {"parallel": {"groups": 1}, "method": {"name": "bsp"}}
            table["data"] = {**table["data"], "group_batch_size": times * table["data"]["group_batch_size"]}
            found.append(Job(f"selsync-batch-{model}-{times}", table, place, "bench"))
    return found


def watched(model: str) -> Job:
    """Return a job of BSP that records Δ in every step: SelSync with δ = 0."""
    return job(model, "watched", {"name": "selsync", "delta": 0.0}, partition=SELDP)


def figure_5_jobs() -> list[Job]:
    return [watched(model) for model in MODELS]


def figure_11_jobs() -> list[Job]:
    """Return the jobs of figure 11. The checkpoints at the end of each epoch contain the weights."""
    return [synchronous("resnet101"), *(each for each in figure_10_jobs() if "resnet101" in each.name)]
