"""Compare groups that are threads with groups that are MPI ranks, in a short training."""

from __future__ import annotations

from pathlib import Path

import torch

from bytes_at_quality.contestants import CONTESTANTS
from bytes_at_quality.training import QUICK, measure, read, start_of, train
from harness import print_table
from hpcsgd.comm import Communicator

HEAD = ["who", "loss, ranks of MPI", "threads", "difference, relative", "bytes a rank, MPI", "threads"]


def compare(world: Communicator, path: Path) -> None:
    """Train every contestant with `QUICK`, for two synchronizations, on these ranks and on threads."""
    torch.set_num_threads(1)
    text, lines = read(path, QUICK), []
    for who, contestant in CONTESTANTS.items():
        tried = contestant.trials[0]
        mine = train(world, QUICK, text, start_of(QUICK, 1), who, tried, 1)
        ranks = world.gather_objects(mine)
        if world.rank == 0:
            virtual = measure(QUICK, text, who, world.size, tried, 1)
            loss, sent = (sum(rank[what] for rank in ranks) / world.size for what in ("test_loss", "bytes"))
            apart = abs(loss / virtual["test_loss"] - 1)
            lines.append(
                [who, f"{loss:.6f}", f"{virtual['test_loss']:.6f}", f"{apart:.1e}", sent, virtual["bytes"]]
            )
        world.barrier()
    if world.rank == 0:
        print_table(lines, HEAD)
