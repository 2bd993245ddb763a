"""One rank of `sparse_exchange.py`: seconds per step of every contestant, in turn; rank 0 writes the rows."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from mpi4py import MPI
from torch import nn, optim

import hpcsgd
from harness import Contestant, Spread, interleaved, ratios
from harness.mpi import Together
from hpcsgd.models import resnet18
from hpcsgd.parts.grad_reduces import per_worker
from hpcsgd.train.process import keep_freed_memory

COMPUTE, DENSE, DEFT = "compute only", "dense", "DEFT"
NOTED = ("select", "encode", "apply")
BATCH = 2


class Trainer:
    """Trains its own ResNet-18 from the same start, on data in memory.

    Without a topology each rank trains alone.
    """

    def __init__(self, topology: hpcsgd.Topology | None, method: hpcsgd.Method | None) -> None:
        torch.manual_seed(0)
        self.model = resnet18()
        self.optimizer: optim.Optimizer = optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.topology = topology
        if topology is not None and method is not None:
            self.optimizer = hpcsgd.DistributedOptimizer(self.optimizer, self.model, topology, method)
        generator = torch.Generator().manual_seed(0 if topology is None else topology.rank)
        self.x = torch.randn(BATCH, 3, 32, 32, generator=generator)
        self.y = torch.randint(10, (BATCH,), generator=generator)
        self.begin()

    def begin(self) -> None:
        """Begin to record; nothing that was before counts."""
        self.noted: list[Mapping[str, float]] = []
        self.messages: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def step(self) -> None:
        before = self.topology.world.stats.totals() if self.topology is not None else {}
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(self.x), self.y).backward()
        self.optimizer.step()
        if not isinstance(self.optimizer, hpcsgd.DistributedOptimizer):
            return
        self.noted.append(dict(self.optimizer.metrics))
        for phase, total in self.optimizer.topology.world.stats.since(before).items():
            self.messages[phase][0] += total.seconds
            self.messages[phase][1] += total.bytes


def trainers(density: float) -> dict[str, Trainer]:
    sparse: dict[str, hpcsgd.Sparse] = {
        "Top-k": hpcsgd.Sparse(hpcsgd.TopK(density)),
        "Top-k, own": hpcsgd.Sparse(hpcsgd.TopK(density), per_worker),
        "CLT-k": hpcsgd.Sparse(hpcsgd.CLTk(density)),
        DEFT: hpcsgd.Sparse(hpcsgd.Deft(density)),
        "DEFT, exact": hpcsgd.Sparse(hpcsgd.Deft(density, exact=True)),
    }
    entries = {COMPUTE: Trainer(None, None), DENSE: Trainer(hpcsgd.init(), hpcsgd.bsp())}
    return entries | {name: Trainer(hpcsgd.init(), hpcsgd.bsp(each)) for name, each in sparse.items()}


def row_of(entry: Trainer, comm: MPI.Comm) -> dict[str, Any]:
    """Return means over the steps: recorded parts of the slowest rank, messages of rank 0."""
    steps = len(entry.noted)
    parts = {
        part: fmean(max(each) for each in zip(*comm.allgather(times), strict=True))
        for part in NOTED
        if (times := [noted[f"{part}_seconds"] for noted in entry.noted if f"{part}_seconds" in noted])
    }
    parts |= {phase: seconds / steps for phase, (seconds, sent) in entry.messages.items() if sent}
    if parts.pop("allocation", None):
        parts["share"] = fmean(noted["share_seconds"] for noted in entry.noted)
    densities = [noted["density"] for noted in entry.noted if "density" in noted]
    return {
        "parts": parts,
        "density": fmean(densities) if densities else None,
        "bytes_a_step": sum(sent for _, sent in entry.messages.values()) / steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True, help="steps in one timed block")
    parser.add_argument("--density", type=float, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    comm = MPI.COMM_WORLD
    entries = trainers(given.density)
    contestants = {
        name: Contestant(entry.step, given.steps, warm=entry.begin) for name, entry in entries.items()
    }
    blocks = interleaved(contestants, rounds=given.rounds, ranks=Together())
    rows = []
    for name, entry in entries.items():
        if name == COMPUTE:
            continue
        row = {"who": name, "ranks": comm.Get_size(), "rounds": given.rounds, **row_of(entry, comm)}
        row["parts"]["compute"] = Spread.of(blocks[COMPUTE].wall).median
        row["seconds_a_step"] = asdict(Spread.of(blocks[name].wall))
        row["deft_over"] = asdict(ratios(blocks[DEFT].wall, blocks[name].wall))
        rows.append(row)
    if comm.Get_rank() == 0:
        given.out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
