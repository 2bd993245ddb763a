"""One rank of `alpha_beta.py`: seconds of every operation at every size, ours and mpi4py's, in turn.

Rank 0 writes the rows.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray

import hpcsgd
from harness import Contestant, Spread, interleaved, ratios
from harness.mpi import Together
from hpcsgd.performance.measuring.operations import BYTES, Room, elements_of, on_comm_thread
from hpcsgd.train.process import keep_freed_memory

Vector = NDArray[np.float32]
Call = Callable[[], Any]
BLOCK_BYTES = 1 << 18
MOST_STEPS = 20


def _alltoall(comm: MPI.Comm, x: Vector, out: Vector) -> Call:
    return partial(comm.Alltoall, x, out)


def _reduce_scatter(comm: MPI.Comm, x: Vector, out: Vector) -> Call:
    return partial(comm.Reduce_scatter_block, x, out[: len(x) // comm.size])


def _allgather(comm: MPI.Comm, x: Vector, out: Vector) -> Call:
    return partial(comm.Allgather, x[: len(x) // comm.size], out)


def _allgatherv(comm: MPI.Comm, x: Vector, out: Vector) -> Call:
    share = len(x) // comm.size
    return partial(comm.Allgatherv, x[:share], [out, [share] * comm.size, MPI.FLOAT])


def _allreduce(comm: MPI.Comm, x: Vector, out: Vector) -> Call:
    return partial(comm.Allreduce, MPI.IN_PLACE, x)


def _bcast(comm: MPI.Comm, x: Vector, out: Vector) -> Call:
    roots = itertools.cycle(range(comm.size))
    return lambda: comm.Bcast(x, next(roots))


def _sendrecv(comm: MPI.Comm, x: Vector, out: Vector) -> Call:
    hop = max(comm.size // 2, 1)
    after, before = (comm.rank + hop) % comm.size, (comm.rank - hop) % comm.size
    return partial(comm.Sendrecv, x, after, recvbuf=out, source=before)


THEIRS: Mapping[str, Callable[[MPI.Comm, Vector, Vector], Call]] = {
    "allgather": _allgather,
    "allgatherv": _allgatherv,
    "allreduce": _allreduce,
    "alltoall": _alltoall,
    "bcast": _bcast,
    "sendrecv": _sendrecv,
    "reduce_scatter": _reduce_scatter,
}


def contestants(comm: MPI.Comm, topology: hpcsgd.Topology, sizes: list[int]) -> dict[str, Contestant]:
    """Return the contestants; ours and mpi4py's of an operation run next to each other in time."""
    room = Room(elements_of(max(sizes), comm.size))
    found: dict[str, Contestant] = {}
    for operation, n in itertools.product(THEIRS, sizes):
        elements = elements_of(n, comm.size)
        steps = max(1, min(MOST_STEPS, BLOCK_BYTES // (elements * BYTES)))
        x, out = room.sent[:elements].numpy(), room.received[:elements].numpy()
        ours = on_comm_thread(operation, topology.world, elements, room)
        found[f"{operation} {elements * BYTES} ours"] = Contestant(ours, steps)
        found[f"{operation} {elements * BYTES} theirs"] = Contestant(THEIRS[operation](comm, x, out), steps)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--sizes", type=int, nargs="+", required=True, help="sizes in bytes")
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    topology, comm = hpcsgd.init(), MPI.COMM_WORLD.Dup()
    entries = contestants(comm, topology, given.sizes)
    blocks = interleaved(entries, rounds=given.rounds, ranks=Together())
    rows: list[dict[str, Any]] = []
    for name in entries:
        operation, n, who = name.split()
        if who != "ours":
            continue
        ours, theirs = blocks[name].wall, blocks[f"{operation} {n} theirs"].wall
        rows.append(
            {
                "ranks": comm.Get_size(), "operation": operation, "bytes": int(n), "rounds": given.rounds,
                "ours": asdict(Spread.of(ours)), "theirs": asdict(Spread.of(theirs)),
                "ratio": asdict(ratios(ours, theirs)),
            }
        )  # fmt: skip
    if comm.Get_rank() == 0:
        given.out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
