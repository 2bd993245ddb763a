"""A program that trains a small model on four ranks for many steps with several methods.

Ranks are processes if a launcher starts the program, and threads otherwise. It writes the resources that were
in use during training: a list of samples for each method, in one file per process.
"""

from __future__ import annotations

import argparse
import gc
import json
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn, optim

import hpcsgd
from hpcsgd.comm import Communicator, threads
from methods.table import EXCEPTIONS, REFERENCES, Case
from train import watched

ENTRIES = {**REFERENCES, **EXCEPTIONS}
RANKS, P = 4, 2
SAMPLES = 48
PERIOD = 12
"""Samples are taken at multiples of this many steps, a multiple of the usual `sync_every` in the table."""
WARM_UP = 0.25
"""The fraction of steps at the start without samples, because some memory is allocated only once."""

Sample = dict[str, int]
kept: list[Any] = []
"""Objects that are never freed."""


def first_of_each() -> list[str]:
    """Return one entry of the table for each method."""
    found: dict[str, str] = {}
    for label, entry in ENTRIES.items():
        found.setdefault(entry.method, label)
    return list(found.values())


def leak(t: int, model: nn.Module) -> None:
    """Leak tensors in every step, and a file and a thread every `PERIOD` steps, as a planted mistake."""
    kept.append([p.detach().clone() for p in model.parameters()])
    if t % PERIOD == 0:
        kept.append(Path("/dev/null").open())  # noqa: SIM115
        threading.Thread(target=threading.Event().wait, daemon=True).start()


def trained(world: Communicator, label: str, steps: int, leaks: bool, looks: bool) -> list[Sample]:
    """Train, and return the samples: step, bytes, threads, files and tensors; empty ones unless `looks`."""
    entry = ENTRIES[label]
    job = entry.form(world, P)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    plain = isinstance(entry, Case) and entry.plain_sgd
    inner = optim.SGD(net.parameters(), lr=0.01) if plain else optim.AdamW(net.parameters(), lr=1e-3)
    optimizer = hpcsgd.DistributedOptimizer(inner, net, job, entry.new(), bucket_cap_mb=1e-3)
    drawn = torch.Generator().manual_seed(world.rank)
    between = max(PERIOD, round(steps * (1 - WARM_UP) / SAMPLES / PERIOD) * PERIOD)
    samples: list[Sample] = []
    for t in range(1, steps + 1):
        optimizer.zero_grad()
        loss = net(torch.randn(2, 8, generator=drawn)).square().mean()
        loss.backward()
        optimizer.step(loss=loss.detach())
        if leaks:
            leak(t, net)
        if t % between == 0 and t > WARM_UP * steps:
            samples.append({"step": t, **at_rest(world, looks)})
    assert all(p.isfinite().all() for p in net.parameters())
    return samples


def at_rest(world: Communicator, looks: bool) -> Sample:
    """Return a sample, taken while all ranks wait and messages in flight have arrived."""
    world.barrier()
    time.sleep(0.01)
    seen = watched.now() if looks else {}
    world.barrier()
    return seen


def on_threads(label: str, *asked: Any) -> list[Sample]:
    """Return the samples of the whole process, taken by rank 0."""
    return threads.run(RANKS, lambda world: trained(world, label, *asked, world.rank == 0), timeout=3000.0)[0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("--leaks", action="store_true")
    parser.add_argument("--processes", action="store_true")
    parser.add_argument("labels", nargs="+")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    gc.freeze()  # excludes the imported objects from the search for tensors in each sample
    place, run = 0, on_threads
    if asked.processes:
        world = hpcsgd.init(groups=1).world
        place, run = world.rank, lambda label, *rest: trained(world, label, *rest, True)
    seen = {label: run(label, asked.steps, asked.leaks) for label in asked.labels}
    Path(f"samples-{place}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
