"""The ranks of this MPI job, as they time together. For what runs on each of them: MPI starts with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from time import sleep

from mpi4py import MPI

PAUSE = 1e-3
"""Seconds between two looks whether the others have come."""


class Together:
    """By MPI's own calls, which wait without a pause: ranks leave a barrier at the same moment. Before they
    do, all have to be there: who is early would take the cores of those who still compute."""

    def meet(self) -> None:
        _rest_until_all_are_here()
        MPI.COMM_WORLD.Barrier()

    def slowest(self, seconds: float) -> float:
        _rest_until_all_are_here()
        return MPI.COMM_WORLD.allreduce(seconds, MPI.MAX)

    def mean(self, values: Mapping[str, float]) -> dict[str, float]:
        """Of each name; who has none of it counts as 0."""
        sums = Counter[str]()
        for each in MPI.COMM_WORLD.allgather(values):
            sums.update(each)
        return {name: sums[name] / MPI.COMM_WORLD.size for name in sorted(sums)}


def _rest_until_all_are_here() -> None:
    coming = MPI.COMM_WORLD.Ibarrier()
    while not coming.Test():
        sleep(PAUSE)
