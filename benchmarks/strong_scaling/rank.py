"""One rank of `strong_scaling.py`: times all contestants on this number of ranks; rank 0 writes the rows."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

import hpcsgd
from harness import Contestant, interleaved
from hpcsgd.train.process import keep_freed_memory
from step_time.networks import Compute
from step_time.rank import RANKS, STORE, Wire, warmed
from strong_scaling.places import WARM_UP, places, workload


def rows(N: int, seconds: float, rounds: int) -> list[dict[str, Any]]:
    """Return the rows, measured in blocks in turn, each from one synchronization to the next."""
    work = workload(Compute(seconds))
    mine, wires, taking_part = list(places(N)), dict[str, Wire](), dict[str, Contestant]()
    for place in mine:
        entry, wire = place.entry(), Wire()
        step = entry.make(work, hpcsgd.init(groups=place.P))
        warm = warmed(step, entry.lead, wire)
        taking_part[place.name] = Contestant(
            wire.counted(step), place.steps, wire.settle, warm, warm_up=WARM_UP
        )
        wires[place.name] = wire
    blocks = interleaved(taking_part, rounds=rounds, ranks=RANKS)
    return [
        {
            "ranks": N, **asdict(place), "every": place.every, "seconds": blocks[place.name].wall,
            **RANKS.mean({
                "sent": wires[place.name].bytes / rounds / place.steps,
                "cpu": median(blocks[place.name].cpu),
            }),
        }
        for place in mine
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="seconds that a rank computes in a step")
    parser.add_argument("--rounds", type=int, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    world = MPI.COMM_WORLD
    dist.init_process_group("gloo", init_method=STORE, rank=world.rank, world_size=world.size)
    found = rows(world.size, given.seconds, given.rounds)
    world.Barrier()
    dist.destroy_process_group()
    if world.rank == 0:
        given.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
