"""One rank of `overhead.py`: times steps with and without Δ in turn, and the parts of Δ alone.

Rank 0 writes the rows.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import hpcsgd
from harness import Contestant, Spread, interleaved, ratios
from harness.mpi import Together
from harness.workloads import RESNET20, Step, sgd
from hpcsgd.comm import mpi
from hpcsgd.core.topology import form
from hpcsgd.train.process import keep_freed_memory

TIMES = 200
"""Number of repetitions of what is too short to time once."""


def trainer(topology: hpcsgd.Topology, method: hpcsgd.Method) -> tuple[Step, hpcsgd.DistributedOptimizer]:
    model = RESNET20.model()
    optimizer = hpcsgd.DistributedOptimizer(sgd(model), model, topology, method=method)
    return RESNET20.training(model, optimizer), optimizer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    world = mpi.world()
    topology = form(world, groups=world.size)
    plain, _ = trainer(topology, hpcsgd.hierarchical(sync_every=10**9))
    chosen, optimizer = trainer(topology, hpcsgd.selsync(float("inf")))
    steps = {"plain": Contestant(plain, given.steps), "chosen": Contestant(chosen, given.steps)}
    whole = interleaved(steps, rounds=given.rounds, ranks=Together())
    parts, part = torch.empty(world.size, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    alone = {
        "norm": Contestant(optimizer._step.squared_norm),
        "allgather": Contestant(lambda: world.allgather(parts, part).wait()),
    }
    blocks = whole | interleaved(alone, rounds=TIMES, ranks=Together())
    spread = {name: asdict(Spread.of(times.wall)) for name, times in blocks.items()}
    over = asdict(ratios(blocks["chosen"].wall, blocks["plain"].wall))
    if world.rank == 0:
        rows: list[dict[str, Any]] = [
            {"what": "step, ResNet-20, batch 32", "seconds": spread["plain"]},
            {"what": "the same with SelSync", "seconds": spread["chosen"], "ratio": over},
            {"what": "Δ: squared norm", "seconds": spread["norm"]},
            {"what": "exchange of 8 bytes", "seconds": spread["allgather"]},
        ]
        given.out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
