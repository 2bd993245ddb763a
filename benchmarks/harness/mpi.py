"""Let the ranks of this MPI job time together. Only scripts that run on each rank import this module.

Importing it initializes MPI.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from time import sleep

from mpi4py import MPI

PAUSE = 1e-3
"""Seconds between two checks whether the other ranks have arrived."""


class Together:
    """The ranks of MPI's world, synchronized by MPI's own calls.

    These calls wait without a pause, so that ranks leave a barrier at the same moment. An early rank would
    take a core from the ranks that still compute. So it sleeps until all have arrived, and only then calls
    MPI.
    """

    def meet(self) -> None:
        _rest_until_all_are_here()
        MPI.COMM_WORLD.Barrier()

    def slowest(self, seconds: float) -> float:
        _rest_until_all_are_here()
        return MPI.COMM_WORLD.allreduce(seconds, MPI.MAX)

    def mean(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the mean of each name's value over the ranks. A rank without the name counts as 0."""
        sums = Counter[str]()
        for each in MPI.COMM_WORLD.allgather(values):
            sums.update(each)
        return {name: sums[name] / MPI.COMM_WORLD.size for name in sorted(sums)}


def _rest_until_all_are_here() -> None:
    coming = MPI.COMM_WORLD.Ibarrier()
    while not coming.Test():
        sleep(PAUSE)
