"""One rank of torch's DistributedDataParallel, which resumes from the last checkpoint.

Rank 0 writes to told.jsonl the step at which each start of the job begins, each step that is made, and each
step that is saved.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

from goodput.network import CLASSES, INPUTS, Net
from harness import WallClock

CHECKPOINT = Path("checkpoint.pt")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--save-every", type=int, required=True)
    given = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = DistributedDataParallel(Net(given.seconds))
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    t, clock, costs = _restored(model, optimizer), WallClock(), []
    _tell("begins", t)
    while True:
        optimizer.zero_grad()
        x, y = torch.randn(given.batch, INPUTS), torch.randint(CLASSES, (given.batch,))
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        t += 1
        _tell("made", t)
        if t % given.save_every == 0:
            clock.start()
            _save(t, model, optimizer)
            costs.append(clock.stop())
            _tell("saved", t, cost=median(costs))


def _restored(model: nn.Module, optimizer: optim.Optimizer) -> int:
    """Load the checkpoint, if there is one; return its step, or 0."""
    if not CHECKPOINT.exists():
        return 0
    saved = torch.load(CHECKPOINT)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["t"]


def _save(t: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
    if dist.get_rank() == 0:
        beside = CHECKPOINT.with_suffix(".new")
        torch.save({"t": t, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, beside)
        beside.replace(CHECKPOINT)


def _tell(what: str, t: int, **more: float) -> None:
    if dist.get_rank() == 0:
        file = os.open("told.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, json.dumps({"what": what, "t": t, **more}).encode() + b"\n")
        os.close(file)


if __name__ == "__main__":
    main()
