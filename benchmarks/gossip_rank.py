"""One rank of `gossip.py`: seconds a step of every contestant, in turn; rank 0 writes the rows."""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contestants import Step, Workload, ddp_tuned, plain
from harness import WARM_UP, Spread, ratios
from mpi4py import MPI
from torch import nn, optim

import hpcsgd
from hpcsgd.models import resnet20
from hpcsgd.training.process import keep_freed_memory
from hpcsgd.transport import Total

WORKLOAD = Workload("ResNet-20", resnet20, (32, 3, 32, 32))


@dataclass(frozen=True)
class Contestant:
    step: Step
    settle: Callable[[], object] = lambda: None
    """Waits for its messages under way: they must not meet the next one's."""
    job: hpcsgd.Job | None = None


def ours(job: hpcsgd.Job, method: hpcsgd.Method) -> Contestant:
    model = WORKLOAD.model()
    optimizer = hpcsgd.DistributedOptimizer(
        optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), model, job, method=method
    )
    images, labels = WORKLOAD.batch()
    loss = nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad()
        loss(model(images), labels).backward()
        optimizer.step()

    return Contestant(step, method.state_dict, job)


def contestants(size: int) -> dict[str, Contestant]:
    def gossip(method: hpcsgd.Method) -> Contestant:
        return ours(hpcsgd.init(groups=size), method)

    return {
        "compute only": Contestant(plain(WORKLOAD)),
        "DDP (gloo)": Contestant(ddp_tuned(WORKLOAD)),
        "AR-SGD": ours(hpcsgd.init(groups=1), hpcsgd.bsp()),
        "D-PSGD": gossip(hpcsgd.d_psgd()),
        "SGP": gossip(hpcsgd.sgp()),
        "2P-SGP": gossip(hpcsgd.sgp(peers=2)),
        "1-OSGP": gossip(hpcsgd.osgp(1)),
        "AD-PSGD": gossip(hpcsgd.ad_psgd()),
        "async SGD": gossip(hpcsgd.async_sgd()),
    }


def measure(
    entries: dict[str, Contestant], rounds: int, steps: int, delay: float, comm: MPI.Comm
) -> list[dict[str, Any]]:
    """Blocks of steps in turn; a step counts as long as it takes in the mean over the ranks. The last rank
    is `delay` seconds late in every step."""
    late = delay if comm.Get_rank() == comm.Get_size() - 1 else 0.0
    seconds: dict[str, list[float]] = {name: [] for name in entries}
    sent = dict.fromkeys(entries, 0.0)
    waited: dict[str, dict[str, float]] = {name: defaultdict(float) for name in entries}
    for turn in range(rounds):
        for name, entry in list(entries.items())[:: 1 if turn % 2 == 0 else -1]:
            comm.Barrier()
            before, start = _totals(entry), time.perf_counter()
            for _ in range(steps):
                entry.step()
                time.sleep(late)
            mine = (time.perf_counter() - start) / steps
            for phase, total in _since(entry, before).items():
                waited[name][phase] += total.waited
            entry.settle()
            sent[name] += sum(total.bytes for total in _since(entry, before).values())
            seconds[name].append(comm.allreduce(mine) / comm.Get_size())
    rows = []
    for name, entry in entries.items():
        row: dict[str, Any] = {"who": name, "ranks": comm.Get_size(), "delay": delay, "rounds": rounds}
        row["seconds_a_step"] = asdict(Spread.of(seconds[name]))
        row["rate_over_AR"] = asdict(ratios(seconds["AR-SGD"], seconds[name]))
        row["rate_over_D-PSGD"] = asdict(ratios(seconds["D-PSGD"], seconds[name]))
        if entry.job is not None:
            done = rounds * steps
            row["bytes_a_step"] = sent[name] / done
            row["waited_a_step"] = {phase: total / done for phase, total in waited[name].items()}
        rows.append(row)
    return rows


def _totals(entry: Contestant) -> dict[str, Total]:
    return entry.job.world.ledger.totals() if entry.job else {}


def _since(entry: Contestant, before: dict[str, Total]) -> dict[str, Total]:
    return entry.job.world.ledger.since(before) if entry.job else {}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True, help="in one timed block")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    comm = MPI.COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()
    store = f"file://{arguments.out}.gloo"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    entries = contestants(size)
    for entry in entries.values():
        for _ in range(WARM_UP):
            entry.step()
        entry.settle()
    rows = measure(entries, arguments.rounds, arguments.steps, 0.0, comm)
    alone = next(row for row in rows if row["who"] == "compute only")["seconds_a_step"]["median"]
    rows += measure(entries, arguments.rounds, arguments.steps, comm.bcast(alone), comm)
    comm.Barrier()
    dist.destroy_process_group()
    if rank == 0:
        arguments.out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
