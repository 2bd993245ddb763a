"""The ranks of this MPI job, as they time together. For what runs on each of them: MPI starts with it."""

from __future__ import annotations

from mpi4py import MPI


class Together:
    """By MPI's own calls, which wait without a pause: ranks leave a barrier at the same moment."""

    def meet(self) -> None:
        MPI.COMM_WORLD.Barrier()

    def slowest(self, seconds: float) -> float:
        return MPI.COMM_WORLD.allreduce(seconds, MPI.MAX)
