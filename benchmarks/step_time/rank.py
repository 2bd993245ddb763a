"""One rank of `step_time.py`: time the contestants of each setting; rank 0 writes the rows."""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

import hpcsgd
from harness import Contestant, interleaved
from harness.mpi import Together
from harness.workloads import Workload
from hpcsgd.train.process import keep_freed_memory
from step_time.contestants import ENTRIES, Entry, sgd
from step_time.networks import Compute, workload
from step_time.settings import Setting

STORE = "tcp://10.77.0.1:29400"
"""The address of the rendezvous of torch.distributed, which is on rank 0's host."""
RANKS = Together()
BARE = "bare "
HEARTBEAT_TIMEOUT, FEW = 0.3, 10_000
"""A host counts as silent if it sends fewer than FEW bytes in HEARTBEAT_TIMEOUT seconds."""
Row = dict[str, Any]


@dataclass
class Wire:
    """The bytes that this host has sent in a contestant's blocks, until nothing travels any more."""

    bytes: int = 0
    blocks: int = 0
    _before: int | None = None

    def counted(self, step: Callable[[], None]) -> Callable[[], None]:
        def counting() -> None:
            if self._before is None:
                self._before = sent()
            step()

        return counting

    def settle(self) -> None:
        silent()
        assert self._before is not None
        self.bytes += sent() - self._before
        self.blocks += 1
        self._before = None

    def reset(self) -> None:
        """Forget the bytes of the warm-up."""
        self.bytes = self.blocks = 0


def silent() -> None:
    """Return when nothing travels any more, because remaining traffic would slow the next contestant."""
    RANKS.meet()
    before, now = -FEW, sent()
    while now - before >= FEW:
        sleep(HEARTBEAT_TIMEOUT)
        before, now = now, sent()
    RANKS.meet()


def sent() -> int:
    """Return the number of bytes that have left this host."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if "eth0:" in line)


def contestants(
    entries: dict[str, Entry], work: Workload, setting: Setting, topology: hpcsgd.Topology, compute: Compute
) -> tuple[dict[str, Contestant], dict[str, Wire]]:
    """Return the contestants, and the counter of each one's bytes.

    If computing is emulated, each contestant also takes part without computing, under the name BARE + name.
    """
    found: dict[str, Contestant] = {}
    wires: dict[str, Wire] = {}
    for name, entry in entries.items():
        step, wire = entry.make(work, topology), Wire()
        steps = -(-setting.steps // entry.period) * entry.period
        found[name] = Contestant(wire.counted(step), steps, wire.settle, warm=warmed(step, entry.lead, wire))
        if setting.kind == "emulated":
            found[BARE + name] = Contestant(compute.without(step), steps, silent, warm_up=0)
        wires[name] = wire
    return found, wires


def warmed(step: Callable[[], None], lead: int, wire: Wire) -> Callable[[], None]:
    """Return a function that makes the additional steps of `Entry.lead`, then resets the counter."""

    def warm() -> None:
        for _ in range(lead):
            step()
        wire.reset()

    return warm


def steps_of(setting: Setting, who: Sequence[str], topology: hpcsgd.Topology) -> Iterator[Row]:
    """Yield the rows of steps, with at most `setting.at_once` contestants in memory at a time."""
    compute = Compute(setting.seconds)
    work = workload(setting.model, setting.kind, compute)
    for first in range(0, len(who), setting.at_once):
        entries = {name: ENTRIES[name] for name in who[first : first + setting.at_once]}
        taking_part, wires = contestants(entries, work, setting, topology, compute)
        blocks = interleaved(taking_part, rounds=setting.rounds, ranks=RANKS)
        for name, wire in wires.items():
            mean = RANKS.mean({"sent": wire.bytes / wire.blocks / taking_part[name].steps})
            yield {
                "model": setting.model, "kind": setting.kind, "who": name,
                "seconds": blocks[name].wall, "sent": mean["sent"],
                "bare": blocks[BARE + name].wall if BARE + name in blocks else None,
            }  # fmt: skip
        del taking_part
        gc.collect()


def synchronizations(setting: Setting, topology: hpcsgd.Topology) -> Iterator[Row]:
    """Time one of our synchronizations, and gloo's allreduce of as many parameters over all ranks."""
    model = workload(setting.model, "emulated", Compute(0.0)).model()
    optimizer = hpcsgd.DistributedOptimizer(sgd(model), model, topology, hpcsgd.hierarchical(1))
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    calls = {"sync": optimizer.average_models, "gloo allreduce": lambda: dist.all_reduce(flat)}
    wires = {name: Wire() for name in calls}
    taking_part = {
        name: Contestant(wires[name].counted(call), 1, wires[name].settle, warm=wires[name].reset, warm_up=1)
        for name, call in calls.items()
    }
    blocks = interleaved(taking_part, rounds=setting.rounds, ranks=RANKS)
    for name, wire in wires.items():
        mean = RANKS.mean({"sent": wire.bytes / wire.blocks})
        yield {"model": setting.model, "what": name, "seconds": blocks[name].wall, "sent": mean["sent"]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--settings", required=True, help="a list of settings, as JSON")
    parser.add_argument("--groups", type=int, required=True)
    parser.add_argument("--who", nargs="+", required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    world = MPI.COMM_WORLD
    dist.init_process_group("gloo", init_method=STORE, rank=world.rank, world_size=world.size)
    topology = hpcsgd.init(groups=given.groups)
    steps: list[Row] = []
    syncs: list[Row] = []
    for setting in (Setting(**each) for each in json.loads(given.settings)):
        steps += steps_of(setting, [name for name in given.who if name not in setting.left_out], topology)
        if setting.kind == "emulated":
            syncs += synchronizations(setting, topology)
        gc.collect()
    world.Barrier()
    dist.destroy_process_group()
    if world.rank == 0:
        given.out.write_text(json.dumps({"steps": steps, "syncs": syncs}))


if __name__ == "__main__":
    main()
