"""One rank of `backends.py`, in two communicators of the same ranks; rank 0 writes the rows."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hpcsgd
from harness import Contestant, Spread, interleaved, ratios
from harness.mpi import Together
from harness.workloads import WORKLOADS, ours
from hpcsgd.train.process import keep_freed_memory

EVERY = 8
BACKENDS = ("mpi", "gloo")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--steps", type=int)
    arguments = parser.parse_args()
    keep_freed_memory()
    rows: list[dict[str, Any]] = []
    rank = 0
    for groups in (1, 2):
        jobs = {backend: hpcsgd.init(groups=groups, backend=backend) for backend in BACKENDS}
        rank = jobs["mpi"].rank
        for workload in WORKLOADS:
            method = hpcsgd.bsp if groups == 1 else lambda: hpcsgd.hierarchical(EVERY)
            contestants = {
                backend: Contestant(ours(workload, topology, method()), arguments.steps)
                for backend, topology in jobs.items()
            }
            blocks = interleaved(contestants, rounds=arguments.rounds, ranks=Together())
            row: dict[str, Any] = {name: Spread.of(blocks[name].wall).median for name in BACKENDS}
            shape = f"{groups} × {jobs['mpi'].group_size}"
            spread = asdict(ratios(blocks["gloo"].wall, blocks["mpi"].wall))
            rows.append({"model": workload.name, "groups": shape, "ratio": spread, **row})
    if rank == 0:
        arguments.out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
