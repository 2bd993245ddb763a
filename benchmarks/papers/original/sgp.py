"""The setting of stochastic gradient push: ResNet-50 on ImageNet for 90 epochs.

A node has 8 GPUs and a batch of 256 samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from hpcsgd.cluster.batch import Allocation
from papers.at_scale import Job

NODES = (4, 8, 16, 32)
GPUS = 8
BATCH = 256
"""Samples per node and step."""
ONE, TWO = {"name": "sgp"}, {"name": "sgp", "peers": 2}
METHODS: Mapping[str, dict[str, Any]] = {
    "ar-sgd": {"name": "bsp"},
    "d-psgd": {"name": "d_psgd"},
    "ad-psgd": {"name": "ad_psgd"},
    "sgp": ONE,
    "1-osgp": {"name": "osgp", "overlap_steps": 1},
    "2p-sgp": TWO,
    "ar-1p-sgp": {"name": "switch", "first": {"name": "bsp"}, "then": ONE, "at": {"epoch": 30}},
    "2p-1p-sgp": {"name": "switch", "first": TWO, "then": ONE, "at": {"epoch": 30}},
}


def job(who: str, nodes: int, epochs: int = 90) -> Job:
    """Return the job of a method on so many nodes, with the learning rates of Goyal et al.

    The rate is 0.1 for 256 samples. In the first 5 epochs it rises to 0.1 times the number of nodes. Three
    times later it falls to a tenth.
    """
    falls = [epochs * part // 9 for part in (3, 6, 8)]
    table = {
        "parallel": {"groups": nodes},
        "data": {"path": "imagenet.h5", "group_batch_size": BATCH},
        "model": {"name": "resnet50"},
        "optimizer": {"lr": 0.1, "arguments": {"momentum": 0.9, "weight_decay": 1e-4, "nesterov": True}},
        "lr_schedule": {
            "scaling": "linear",
            "warmup_epochs": 5,
            "name": "MultiStepLR",
            "arguments": {"milestones": falls},
        },
        "method": METHODS[who],
        "training": {"epochs": epochs},
    }
    place = Allocation(
        nodes=nodes, ranks_per_node=GPUS, gpus_per_node=GPUS, cpus_per_rank=8, time="1-00:00:00"
    )
    return Job(f"sgp-{who}-{nodes}" + ("" if epochs == 90 else f"-{epochs}"), table, place)


def jobs(who: Sequence[str], nodes: Sequence[int]) -> list[Job]:
    return [job(each, n) for each in who for n in nodes]


table_1_jobs = partial(jobs, ("ar-sgd", "d-psgd", "sgp"), NODES)
table_2_jobs = partial(jobs, ("ar-sgd", "2p-sgp", "sgp", "ar-1p-sgp", "2p-1p-sgp"), (16, 32))
table_3_jobs = partial(jobs, ("ar-sgd", "d-psgd", "ad-psgd", "sgp", "1-osgp"), (16,))
figure_4_jobs = partial(jobs, ("ar-sgd", "d-psgd", "sgp"), (8, 16))


def table_4_jobs() -> list[Job]:
    return [job("ar-sgd", 32), *(job(who, 32, epochs=270) for who in ("ad-psgd", "sgp", "1-osgp"))]
