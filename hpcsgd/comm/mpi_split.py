"""Splitting of an MPI communicator: the ranks wait for each other without spinning, then make the parts.

In MPI_Comm_split, ranks that are early would spin until the last rank comes. Here they poll with pauses.
"""

from __future__ import annotations

import math

import numpy as np

from hpcsgd.comm.backend import polled
from hpcsgd.comm.mpi_library import MPI
from hpcsgd.comm.mpi_waits import asleep


def split(comm: MPI.Intracomm, color: int, key: int, tag: int) -> tuple[MPI.Intracomm, list[int]]:
    """Return a communicator of the ranks of one `color`, ordered by (`key`, rank), and these ranks of `comm`.

    Collective over `comm`. Messages on `comm` must not have the same `tag`.
    """
    colors, keys = places(comm, color, key, tag).T.tolist()
    members = sorted((r for r, theirs in enumerate(colors) if theirs == color), key=lambda r: (keys[r], r))
    everyone = comm.Get_group()
    group = everyone.Incl(members)
    with asleep():
        made = comm.Create_group(group, tag)
    group.Free()
    everyone.Free()
    return made, members


def places(comm: MPI.Intracomm, color: int, key: int, tag: int) -> np.ndarray:
    """Return the color and the key of each rank, shape (ranks, 2), dtype int64.

    In round i, each rank receives what rank + 2^i knows. No rank returns before all ranks have called this.
    """
    rank, size = comm.Get_rank(), comm.Get_size()
    known = np.empty((size, 2), np.int64)  # row i belongs to rank + i
    known[0] = color, key
    step = 1
    while step < size:
        count = min(step, size - step)
        received = comm.Irecv(known[step : step + count], (rank + step) % size, tag)
        sent = comm.Isend(known[:count], (rank - step) % size, tag)
        for request in (received, sent):
            polled(request.Test, math.inf)
        step *= 2
    return np.roll(known, rank, axis=0)
