"""The ranks of this MPI job, as they time together. For what runs on each of them: MPI starts with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from mpi4py import MPI


class Together:
    """By MPI's own calls, which wait without a pause: ranks leave a barrier at the same moment."""

    def meet(self) -> None:
        MPI.COMM_WORLD.Barrier()

    def slowest(self, seconds: float) -> float:
        return MPI.COMM_WORLD.allreduce(seconds, MPI.MAX)

    def mean(self, values: Mapping[str, float]) -> dict[str, float]:
        """Of each name; who has none of it counts as 0."""
        sums = Counter[str]()
        for each in MPI.COMM_WORLD.allgather(values):
            sums.update(each)
        return {name: sums[name] / MPI.COMM_WORLD.size for name in sorted(sums)}
