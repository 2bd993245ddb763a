"""One rank of `gossip.py`: seconds per step of every contestant, in turn; rank 0 writes the rows."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

import hpcsgd
from gossip.doubling import doubling, sent
from harness import Contestant, Spread, interleaved, ratios
from harness.mpi import Together
from harness.workloads import RESNET20, Step, ddp_tuned, ours, plain
from hpcsgd.comm import CommStats, Total
from hpcsgd.train.process import keep_freed_memory

DOUBLING = "AR-SGD by doubling"


@dataclass(frozen=True)
class Entry:
    """A training step, and what it sends: from the counts of our messages, or a known number."""

    step: Step
    stats: CommStats | None = None
    all_arrived: Callable[[], object] = lambda: None
    """Waits for messages that no step has waited for."""
    sent: float | None = None

    @classmethod
    def of(cls, topology: hpcsgd.Topology, method: hpcsgd.Method) -> Entry:
        return cls(ours(RESNET20, topology, method), topology.world.stats, method.state_dict)

    def block(self, steps: int, late: float) -> None:
        """Make so many steps, with this rank `late` seconds late in each, and wait for all messages.

        A block that ended sooner would take less time than the links need.
        """
        for _ in range(steps):
            self.step()
            time.sleep(late)
        self.all_arrived()


def entries(size: int) -> dict[str, Entry]:
    def gossip(method: hpcsgd.Method) -> Entry:
        return Entry.of(hpcsgd.init(groups=size), method)

    return {
        "compute only": Entry(plain(RESNET20)),
        "DDP (gloo)": Entry(ddp_tuned(RESNET20)),
        "AR-SGD": Entry.of(hpcsgd.init(groups=1), hpcsgd.bsp()),
        DOUBLING: Entry(doubling(RESNET20, hpcsgd.init(groups=1).world), sent=sent(RESNET20, size)),
        "D-PSGD": gossip(hpcsgd.d_psgd()),
        "SGP": gossip(hpcsgd.sgp()),
        "2P-SGP": gossip(hpcsgd.sgp(peers=2)),
        "1-OSGP": gossip(hpcsgd.osgp(1)),
        "AD-PSGD": gossip(hpcsgd.ad_psgd()),
        "async SGD": gossip(hpcsgd.async_sgd()),
    }


def measure(
    table: dict[str, Entry], rounds: int, steps: int, delay: float, comm: MPI.Comm
) -> list[dict[str, Any]]:
    """Measure blocks of steps in turn. The last rank is `delay` seconds late in every step."""
    late = delay if comm.Get_rank() == comm.Get_size() - 1 else 0.0
    before: dict[str, dict[str, Total]] = {}

    def contestant(name: str, entry: Entry) -> Contestant:
        def begin() -> None:
            if entry.stats is not None:
                before[name] = entry.stats.totals()

        return Contestant(lambda: entry.block(steps, late), warm=begin, warm_up=1)

    blocks = interleaved(
        {name: contestant(name, entry) for name, entry in table.items()}, rounds=rounds, ranks=Together()
    )
    seconds = {name: [wall / steps for wall in times.wall] for name, times in blocks.items()}
    rows = []
    for name, entry in table.items():
        row: dict[str, Any] = {"who": name, "ranks": comm.Get_size(), "delay": delay, "rounds": rounds}
        row["seconds_a_step"] = asdict(Spread.of(seconds[name]))
        row["rate_over_AR"] = asdict(ratios(seconds["AR-SGD"], seconds[name]))
        row["rate_over_D-PSGD"] = asdict(ratios(seconds["D-PSGD"], seconds[name]))
        row["rate_over_doubling"] = asdict(ratios(seconds[DOUBLING], seconds[name]))
        if entry.sent is not None:
            row["bytes_a_step"] = entry.sent
        if entry.stats is not None:
            spent, done = entry.stats.since(before[name]), rounds * steps
            row["bytes_a_step"] = sum(total.bytes for total in spent.values()) / done
            row["waited_a_step"] = {phase: total.waited / done for phase, total in spent.items()}
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True, help="steps in one timed block")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    comm = MPI.COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()
    store = f"file://{arguments.out}.gloo"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    table = entries(size)
    rows = measure(table, arguments.rounds, arguments.steps, 0.0, comm)
    alone = next(row for row in rows if row["who"] == "compute only")["seconds_a_step"]["median"]
    rows += measure(table, arguments.rounds, arguments.steps, comm.bcast(alone), comm)
    comm.Barrier()
    dist.destroy_process_group()
    if rank == 0:
        arguments.out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
