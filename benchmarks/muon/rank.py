"""One rank of `muon.py`: all contestants in turn; rank 0 writes the rows."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI
from torch import nn, optim
from torch.nn.functional import cross_entropy

import hpcsgd
from harness import Contestant, Spread, interleaved, ratios
from harness.mpi import Together
from hpcsgd.models import gpt
from hpcsgd.train.process import keep_freed_memory
from muon import ADAMW, EVERYBODY, OWNED

TYPES, TOKENS = 256, 128
Make = Callable[[nn.Module], optim.Optimizer]
ENTRIES: dict[str, tuple[Make, dict[str, Any]]] = {
    OWNED: (lambda net: hpcsgd.muon(net, lr=1e-3), {}),
    EVERYBODY: (lambda net: hpcsgd.muon(net, lr=1e-3), {"tensorwise": False}),
    ADAMW: (lambda net: optim.AdamW(net.parameters(), lr=1e-3), {}),
}


@dataclass
class Training:
    """A GPT on random tokens, by the synchronous method."""

    name: str
    width: int
    layers: int

    def __post_init__(self) -> None:
        make, options = ENTRIES[self.name]
        self.topology = hpcsgd.init(groups=1)
        self.net = gpt(TYPES, width=self.width, layers=self.layers, heads=4)
        inner = make(self.net)
        self.optimizer = hpcsgd.DistributedOptimizer(inner, self.net, self.topology, hpcsgd.bsp(), **options)
        self.x = torch.randint(TYPES, (1, TOKENS + 1))
        self.warm_bytes = 0.0

    def step(self) -> None:
        self.optimizer.zero_grad()
        cross_entropy(self.net(self.x[:, :-1]).flatten(0, 1), self.x[:, 1:].flatten()).backward()
        self.optimizer.step()

    def warm(self) -> None:
        self.warm_bytes = self.sent()

    def sent(self) -> float:
        return sum(total.bytes for total in self.topology.world.stats.totals().values())

    def state(self) -> int:
        """Return the bytes of optimizer state on this rank."""
        values = (x for state in self.optimizer.state.values() for x in state.values())
        return sum(x.nbytes for x in values if isinstance(x, torch.Tensor) and x.dim())


def measured(width: int, layers: int, rounds: int, steps: int, comm: MPI.Comm) -> list[dict[str, Any]]:
    trainings = {name: Training(name, width, layers) for name in ENTRIES}
    contestants = {name: Contestant(x.step, steps, warm=x.warm) for name, x in trainings.items()}
    blocks = interleaved(contestants, rounds=rounds, ranks=Together())
    rows = []
    for name, x in trainings.items():
        rows.append({
            "ranks": comm.Get_size(), "width": width, "layers": layers, "who": name,
            "numel": sum(p.numel() for p in x.net.parameters()),
            "rounds": rounds, "steps_a_round": steps,
            "seconds_a_step": asdict(Spread.of(blocks[name].wall)),
            "ratio": asdict(ratios(blocks[name].wall, blocks[EVERYBODY].wall)),
            "state_bytes_at_most": comm.allreduce(x.state(), MPI.MAX),
            "bytes_a_step": (x.sent() - x.warm_bytes) / (rounds * steps),
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    for name in ("width", "layers", "rounds", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    comm = MPI.COMM_WORLD
    rows = measured(arguments.width, arguments.layers, arguments.rounds, arguments.steps, comm)
    if comm.Get_rank() == 0:
        arguments.out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
