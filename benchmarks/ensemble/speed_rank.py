"""One rank of `speed.py`: time the steps of every contestant in turn; rank 0 writes the rows.

All ranks are in one MPI job. A group is a communicator of one rank in it. Groups exchange data through their
ring and the coordinator, over the same links as MPI.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI

import hpcsgd
from harness import Contestant, Spread, interleaved, ratios
from harness.mpi import Together
from harness.workloads import Workload, plain, sgd
from hpcsgd.comm import mpi
from hpcsgd.core.topology import form
from hpcsgd.elastic.join_info import JoinInfo
from hpcsgd.models import cifar_resnet
from hpcsgd.train.process import keep_freed_memory

BATCH = 16
WORKLOAD = Workload("ResNet-8", lambda: cifar_resnet(8), (BATCH, 3, 32, 32))
SOME = 4
"""Steps per block of contestants that communicate in each step.

For the others a block lasts from one synchronization to the next.
"""
ALONE = "compute only"


def ours(
    topology: hpcsgd.Topology, method: hpcsgd.Method, steps: int, natural_rank: int | None = None
) -> Contestant:
    model = WORKLOAD.model()
    optimizer: Any = hpcsgd.DistributedOptimizer(sgd(model), model, topology, method=method)
    if natural_rank is not None:
        optimizer = hpcsgd.NaturalGradient(optimizer, model, rank=natural_rank)
    return Contestant(WORKLOAD.training(model, optimizer), steps, settle=method.state_dict)


def contestants(replica_group: hpcsgd.Topology, every: int) -> dict[str, Contestant]:
    return {
        ALONE: Contestant(plain(WORKLOAD), every),
        "sync SGD": ours(hpcsgd.init(groups=1), hpcsgd.bsp(), SOME),
        "async SGD": ours(hpcsgd.init(group_size=1), hpcsgd.async_sgd(), SOME),
        "EnsembleSync": ours(replica_group, hpcsgd.ensemble_sync(every), every),
        "with natural gradient": ours(replica_group, hpcsgd.ensemble_sync(every), every, natural_rank=20),
    }


def measure(entries: dict[str, Contestant], rounds: int) -> list[dict[str, Any]]:
    blocks = interleaved(entries, rounds=rounds, ranks=Together())
    sync = blocks.get("sync SGD", blocks[ALONE]).wall
    return [
        {
            "who": name,
            "rounds": rounds,
            "seconds_a_step": asdict(Spread.of(times.wall)),
            "speed_over_sync": asdict(ratios(sync, times.wall)),
        }
        for name, times in blocks.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--every", type=int, required=True)
    parser.add_argument("--coordinator", help="its address; without it, only computing alone is timed")
    parser.add_argument("--token", default="")
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    rank = MPI.COMM_WORLD.Get_rank()
    if given.coordinator is None:
        rows = measure({ALONE: Contestant(plain(WORKLOAD), given.every)}, given.rounds)
        bytes_ = 4 * sum(w.numel() for w in WORKLOAD.model().parameters())
        rows[0] |= {"bytes": bytes_}
    else:
        world = mpi.world()
        own = form(world.split(world.rank, 0))
        invited = JoinInfo(world.rank, world.size, given.coordinator, given.token, 10.0, 300.0)
        elastic_average = invited.accept(own.world)
        rows = measure(contestants(replace(own, replica_groups=elastic_average), given.every), given.rounds)
        elastic_average.finish()
        elastic_average.close()
    if rank == 0:
        given.out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
