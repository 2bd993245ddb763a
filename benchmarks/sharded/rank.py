"""One rank of `sharded.py`: times all contestants in one setting; rank 0 writes the rows."""

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
from sharded.contestants import ENTRIES
from sharded.settings import MEMORY, MODEL, Setting
from step_time.networks import Compute, workload
from step_time.rank import RANKS, STORE, Wire


def rows(setting: Setting) -> list[dict[str, Any]]:
    topology = hpcsgd.init(groups=setting.P)
    work = workload(MODEL, "emulated", Compute(setting.seconds))
    taking_part, wires = dict[str, Contestant](), dict[str, Wire]()
    for name, entry in ENTRIES.items():
        step, wire = entry.make(work, topology), Wire()
        steps = -(-setting.steps // entry.period) * entry.period
        if setting.rate == MEMORY:  # nothing leaves this host
            taking_part[name] = Contestant(step, steps, RANKS.meet)
        else:
            taking_part[name] = Contestant(wire.counted(step), steps, wire.settle, wire.reset)
        wires[name] = wire
    blocks = interleaved(taking_part, rounds=setting.rounds, ranks=RANKS)
    return [
        {
            **asdict(setting), "who": name, "period": entry.period, "seconds": blocks[name].wall,
            **RANKS.mean({
                "sent": wires[name].bytes / setting.rounds / taking_part[name].steps,
                "cpu": median(blocks[name].cpu),
            }),
        }
        for name, entry in ENTRIES.items()
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--setting", required=True, help="as JSON")
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    setting, world = Setting(**json.loads(given.setting)), MPI.COMM_WORLD
    if setting.rate != MEMORY:  # hosts have no names here, so torch needs an address to connect to
        dist.init_process_group("gloo", init_method=STORE, rank=world.rank, world_size=world.size)
    found = rows(setting)
    world.Barrier()
    if dist.is_initialized():
        dist.destroy_process_group()
    if world.rank == 0:
        given.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
