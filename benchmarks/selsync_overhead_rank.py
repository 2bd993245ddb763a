"""One rank of `selsync_overhead.py`: steps with and without Δ in turn, and its parts alone; rank 0 writes."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from contestants import Workload
from harness import Spread, interleaved, ratios
from torch import nn, optim

import hpcsgd
from hpcsgd.core.topology import form
from hpcsgd.models import cifar_resnet
from hpcsgd.training.process import keep_freed_memory
from hpcsgd.transport import mpi

WORKLOAD = Workload("ResNet-20", lambda: cifar_resnet(20), (32, 3, 32, 32))
TIMES = 200
"""Of what is too short for one look."""


def trainer(job: hpcsgd.Job, method: hpcsgd.Method) -> tuple[Any, hpcsgd.DistributedOptimizer]:
    model = WORKLOAD.model()
    sgd = optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    optimizer = hpcsgd.DistributedOptimizer(sgd, model, job, method=method)
    images, labels = WORKLOAD.batch()
    loss = nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad()
        loss(model(images), labels).backward()
        optimizer.step()

    return step, optimizer


def timed(call: Any, barrier: Any) -> Spread:
    taken = []
    for _ in range(TIMES):
        barrier()
        start = perf_counter()
        call()
        taken.append(perf_counter() - start)
    return Spread.of(taken)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    world = mpi.world()
    job = form(world, groups=world.size)
    plain, _ = trainer(job, hpcsgd.hierarchical(every=10**9))
    chosen, optimizer = trainer(job, hpcsgd.selsync(float("inf")))
    nothing = torch.zeros(1)

    def barrier() -> None:
        world.allreduce(nothing).wait()

    def slowest(seconds: float) -> float:
        x = torch.tensor([seconds], dtype=torch.float64)
        world.allreduce(x, "max").wait()
        return x.item()

    contestants = {"plain": plain, "chosen": chosen}
    blocks = interleaved(contestants, rounds=given.rounds, steps=given.steps, meet=barrier, slowest=slowest)
    parts, part = torch.empty(world.size, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    norm = timed(optimizer._step.squared_norm, lambda: None)
    exchange = timed(lambda: world.allgather(parts, part).wait(), barrier)
    if world.rank == 0:
        over = ratios(blocks["chosen"].wall, blocks["plain"].wall)
        rows = [
            {"what": "step, ResNet-20, batch 32", "seconds": asdict(Spread.of(blocks["plain"].wall))},
            {
                "what": "the same with SelSync",
                "seconds": asdict(Spread.of(blocks["chosen"].wall)),
                "ratio": asdict(over),
            },
            {"what": "Δ: squared norm", "seconds": asdict(norm)},
            {"what": "exchange of 8 bytes", "seconds": asdict(exchange)},
        ]
        given.out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
