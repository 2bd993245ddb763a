"""The settings of section 5.1 of the DEFT paper, for up to 32 workers with one V100 each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from hpcsgd.cluster.batch import Allocation
from papers.at_scale import Job

MODELS: Mapping[str, dict[str, Any]] = {
    "resnet18": {
        "data": {"path": "cifar10.h5", "group_batch_size": 25, "transform": "crop_and_flip"},
        "model": {"name": "resnet18"},
        "optimizer": {"lr": 0.1, "arguments": {"momentum": 0.9, "weight_decay": 5e-4}},
        "lr_schedule": {"scaling": "none", "name": "MultiStepLR", "arguments": {"milestones": [100, 150]}},
        "training": {"epochs": 200},
    },
    "lstm": {
        "data": {"path": "wikitext2.h5", "group_batch_size": 20, "arguments": {"bptt": 35}},
        "model": {"name": "lstm", "arguments": {"types": 33_278}},
        "optimizer": {"lr": 20.0},
        "lr_schedule": {"scaling": "none"},
        "training": {"epochs": 90},
    },
    "ncf": {
        "data": {"path": "movielens20m.h5", "group_batch_size": 65_536},
        "model": {"name": "ncf", "arguments": {"users": 138_493, "items": 26_744}},
        "optimizer": {"name": "Adam", "lr": 1e-3},
        "lr_schedule": {"scaling": "none"},
        "training": {"epochs": 30},
    },
}
"""The settings by model.

The batch sizes, rates and epochs of table 2 are missing in our text of the paper; these are usual values. The
batch size is that of one worker.
"""
DENSITY = {"resnet18": 0.01, "lstm": 0.001, "ncf": 0.1}
RIVALS = ("topk", "clt_k", "deft")


def job(model: str, name: str, grad_reduce: dict[str, Any] | None, workers: int) -> Job:
    """Return the job of one group of `workers`, with up to four on each node."""
    each = min(workers, 4)
    place = Allocation(nodes=workers // each, ranks_per_node=each, gpus_per_node=each, time="1-00:00:00")
    table = MODELS[model] | {"parallel": {"groups": 1}, "method": {"name": "bsp"} | (grad_reduce or {})}
    data = {**table["data"], "group_batch_size": workers * table["data"]["group_batch_size"]}
    return Job(f"deft-{model}-{name}-{workers}", {**table, "data": data}, place)


def sparse(name: str, density: float) -> dict[str, Any]:
    return {"grad_reduce": {"name": "sparse", "sparsifier": {"name": name, "density": density}}}


def rival_jobs() -> list[Job]:
    found = [job(model, who, sparse(who, DENSITY[model]), 16) for model in MODELS for who in RIVALS]
    return found + [job(model, "dense", None, 16) for model in MODELS]


def figure_1_jobs() -> list[Job]:
    return [job("lstm", "topk", sparse("topk", DENSITY["lstm"]), n) for n in (2, 4, 8, 16)]


def figure_6_jobs() -> list[Job]:
    """Return the jobs of figure 6. DEFT has ten times the density: the factor is missing in our text."""
    found = [job(m, "topk", sparse("topk", DENSITY[m]), 16) for m in ("resnet18", "lstm")]
    return found + [job(m, "deft-10", sparse("deft", 10 * DENSITY[m]), 16) for m in ("resnet18", "lstm")]


def figure_8_jobs() -> list[Job]:
    densities = (0.1, 0.01, 0.001)
    return [job("resnet18", f"deft-{d:g}", sparse("deft", d), 16) for d in densities]


def by_workers_jobs(rivals: Sequence[str]) -> list[Job]:
    """Return the jobs of figure 9 or 10. The metrics of each step have the seconds of selecting."""
    return [job("lstm", who, sparse(who, DENSITY["lstm"]), n) for who in rivals for n in (1, 2, 4, 8, 16, 32)]


figure_9_jobs = partial(by_workers_jobs, ("topk", "deft"))
figure_10_jobs = partial(by_workers_jobs, ("deft",))
