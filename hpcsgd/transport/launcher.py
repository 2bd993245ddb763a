"""How many ranks the launcher meant, as its environment says."""

from __future__ import annotations

from collections.abc import Mapping

from hpcsgd.errors import JobError

# In order of precedence: under mpiexec inside a Slurm job, Slurm counts only the launcher's helpers.
_COUNTS = {
    "OMPI_COMM_WORLD_SIZE": "Open MPI's mpiexec",
    "PMI_SIZE": "mpiexec or srun with PMI",
    "SLURM_STEP_NUM_TASKS": "srun",
}

_ON_NODE = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "SLURM_LOCALID")

_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


def intended_size(environ: Mapping[str, str]) -> tuple[int, str] | None:
    """(ranks, "launcher (VARIABLE)") or None where no launcher left a trace."""
    for variable, launcher in _COUNTS.items():
        if environ.get(variable, "").isdigit():
            return int(environ[variable]), f"{launcher} ({variable})"
    return None


def intended_rank(environ: Mapping[str, str]) -> int:
    """This process's number among those that the launcher started; 0 where no launcher left a trace."""
    return next((int(environ[name]) for name in _RANKS if environ.get(name, "").isdigit()), 0)


def intended_place(environ: Mapping[str, str]) -> int | None:
    """This process's number among those that the launcher started on its node; None where none says it."""
    return next((int(environ[name]) for name in _ON_NODE if environ.get(name, "").isdigit()), None)


def check_world(size: int, library: str, environ: Mapping[str, str]) -> None:
    """Raise `JobError` unless MPI sees as many ranks as were started.

    A launcher and an MPI library that do not fit each other give N worlds of one rank, each training alone
    and overwriting the others' results.
    """
    intended = intended_size(environ)
    if intended is None or intended[0] == size:
        return
    ranks, launcher = intended
    raise JobError(
        f"{launcher} started {ranks} ranks but MPI sees a world of {size}: the launcher does not fit the MPI "
        f"library ({library}). Use that library's own mpiexec, or srun with a matching --mpi= "
        "(MPICH: --mpi=pmi2, Open MPI: --mpi=pmix)"
    )
