"""One rank of `step_overhead.py`, with any number of ranks; rank 0 writes the rows."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

import hpcsgd
from harness import Contestant, Spread, WallClock, interleaved, ratios
from harness.mpi import Together
from harness.workloads import WORKLOADS, Step, Workload, ddp_tuned, ours, plain
from hpcsgd.train.process import keep_freed_memory
from step_overhead.devices import device_of
from step_overhead.rivals import ddp, ddp_local_sgd

EVERY = 8
COPIES = 5


@dataclass(frozen=True)
class Entry:
    """A contestant. It is compared with the fastest of those whose names begin with `against`."""

    make: Callable[[Workload], Step]
    against: str | None = None
    topology: hpcsgd.Topology | None = None

    def sent(self) -> float:
        """Return the bytes that this rank has sent."""
        return (
            sum(total.bytes for total in self.topology.world.stats.totals().values())
            if self.topology
            else 0.0
        )


def one_rank() -> dict[str, Entry]:
    def entry(method: hpcsgd.Method) -> Entry:
        topology = hpcsgd.init()
        return Entry(lambda w: ours(w, topology, method), "plain torch", topology)

    return {
        "plain torch": Entry(plain),
        "hpcsgd bsp": entry(hpcsgd.bsp()),
        "hpcsgd hierarchical": entry(hpcsgd.hierarchical(EVERY)),
    }


def many_ranks(size: int) -> dict[str, Entry]:
    """Return the contestants; neighbors in this table run next to each other in time."""

    def entry(groups: int, method: hpcsgd.Method, against: str) -> Entry:
        topology = hpcsgd.init(groups=groups)
        return Entry(lambda w: ours(w, topology, method), against, topology)

    half = size // 2
    return {
        "compute only": Entry(plain, "DDP"),
        "DDP as it comes": Entry(ddp),
        "DDP tuned": Entry(ddp_tuned),
        f"hpcsgd bsp 1×{size}": entry(1, hpcsgd.bsp(), "DDP"),
        f"hpcsgd hierarchical 2×{half}": entry(2, hpcsgd.hierarchical(EVERY), f"torch local SGD 2×{half}"),
        f"torch local SGD 2×{half}": Entry(lambda w: ddp_local_sgd(w, 2, EVERY), "DDP"),
    }


def contestant(name: str, entry: Entry, workload: Workload, steps: int, sent: dict[str, float]) -> Contestant:
    """Return a contestant that records in `sent` how much it has sent when it is warm."""
    return Contestant(entry.make(workload), steps, warm=lambda: sent.update({name: entry.sent()}))


def measure(
    workload: Workload, entries: dict[str, Entry], rounds: int, steps: int, comm: MPI.Comm
) -> list[dict[str, Any]]:
    sent: dict[str, float] = {}
    contestants = {name: contestant(name, entry, workload, steps, sent) for name, entry in entries.items()}
    on_host = workload.device.type == "cpu"
    clock = WallClock() if on_host else WallClock(lambda: torch.accelerator.synchronize(workload.device))
    bytes_at_most = {} if on_host else peaks(workload, entries)
    blocks = interleaved(contestants, rounds=rounds, ranks=Together(), clock=clock)
    rows = []
    for name, entry in entries.items():
        row: dict[str, Any] = {"ranks": comm.Get_size(), "model": workload.name, "who": name}
        row |= {
            "rounds": rounds,
            "steps_a_round": steps,
            "seconds_a_step": asdict(Spread.of(blocks[name].wall)),
        }
        row["cpu_seconds_a_step"] = asdict(Spread.of(blocks[name].cpu))
        if entry.against:
            rivals = [rival for rival in entries if rival.startswith(entry.against)]
            row["against"] = min(rivals, key=lambda rival: Spread.of(blocks[rival].wall).median)
            baseline = blocks[row["against"]]
            row["ratio"] = asdict(ratios(blocks[name].wall, baseline.wall))
            row["cpu_ratio"] = asdict(ratios(blocks[name].cpu, baseline.cpu))
        if name in bytes_at_most:
            row["peak_device_bytes"] = bytes_at_most[name]
        if entry.topology:
            row["bytes_a_step"] = (entry.sent() - sent[name]) / (rounds * steps)
        rows.append(row)
    return rows


def peaks(workload: Workload, entries: dict[str, Entry]) -> dict[str, int]:
    """Return the peak of bytes on the device in a step, for each contestant alone."""
    found = {}
    for name, entry in entries.items():
        before = torch.accelerator.memory_allocated(workload.device)
        step = entry.make(workload)
        step()
        torch.accelerator.reset_peak_memory_stats(workload.device)
        step()
        found[name] = torch.accelerator.max_memory_allocated(workload.device) - before
    return found


def copy_rates(comm: MPI.Comm, megabytes: int = 64) -> dict[str, float]:
    """Return bytes per second of a rank while all are busy: of a memory copy, and sent by an all-to-all."""
    x = torch.ones(megabytes * 250_000)
    y = torch.zeros_like(x)
    size = x.numel() * x.element_size()
    moved = {"memory_copy": size, "alltoall": size * (1 - 1 / comm.Get_size())}
    contestants = {
        "memory_copy": Contestant(lambda: y.copy_(x)),
        "alltoall": Contestant(lambda: comm.Alltoall(x.numpy(), y.numpy())),
    }
    blocks = interleaved(contestants, rounds=COPIES, ranks=Together())
    return {name: moved[name] / min(times.wall) for name, times in blocks.items()}


def join(comm: MPI.Comm, folder: str, device: torch.device) -> None:
    """Start torch's processes by gloo, or by torch's backend for devices of that type, such as NCCL."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend, rendezvous = dist.get_default_backend_for_device(device), f"file://{folder}/store"
    dist.init_process_group(backend, init_method=rendezvous, rank=comm.Get_rank(), world_size=comm.Get_size())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True, help="steps in one timed block")
    parser.add_argument("--device", default="cpu", help="the kind of device that all ranks train on")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # for all contestants: page faults vary with the heap by ±5 %
    comm = MPI.COMM_WORLD
    several = comm.Get_size() > 1
    device = device_of(arguments.device, comm.Get_rank())
    with tempfile.TemporaryDirectory() as folder:
        if several:
            join(comm, comm.bcast(folder), device)
        entries = many_ranks(comm.Get_size()) if several else one_rank()
        rates = copy_rates(comm)
        rows = [
            row
            for workload in WORKLOADS
            for row in measure(
                replace(workload, device=device), entries, arguments.rounds, arguments.steps, comm
            )
        ]
        comm.Barrier()
        if several:
            dist.destroy_process_group()
    if comm.Get_rank() == 0:
        arguments.out.write_text(json.dumps({"rows": rows, "rates": rates}))


if __name__ == "__main__":
    main()
