"""What the launchers leave in the environment, and worlds that are not what they started."""

from __future__ import annotations

import pytest

from hpcsgd.errors import JobError
from hpcsgd.transport.launcher import check_world, intended_rank, intended_size

SLURM_STEP = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}
# (environment, ranks it means, rank it means)
LAUNCHERS = {
    "plain python": ({}, None, 0),
    "mpich mpiexec": ({"PMI_SIZE": "4", "PMI_RANK": "2", "PMI_FD": "6"}, 4, 2),
    "Open MPI mpiexec": ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"}, 4, 1),
    "srun --mpi=pmi2": (SLURM_STEP | {"PMI_SIZE": "4", "PMI_RANK": "3"}, 4, 3),
    "srun --mpi=pmix": (SLURM_STEP | {"PMIX_RANK": "3"}, 4, 3),
    "srun without --mpi": (SLURM_STEP, 4, 3),
    # One helper of the launcher on each of two nodes is what Slurm counts.
    "mpich mpiexec in a Slurm job": (
        {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "PMI_SIZE": "8", "PMI_RANK": "5"}, 8, 5,
    ),
    "Open MPI mpiexec in a Slurm job": (
        {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "OMPI_COMM_WORLD_SIZE": "8",
         "OMPI_COMM_WORLD_RANK": "6"}, 8, 6,
    ),
    "python in a batch script, without srun": ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None, 0),
    "something else entirely": ({"PMI_SIZE": "", "SLURM_STEP_NUM_TASKS": "many"}, None, 0),
}  # fmt: skip


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_what_the_launcher_meant(launcher: str) -> None:
    environ, ranks, rank = LAUNCHERS[launcher]
    meant = intended_size(environ)
    assert (meant[0] if meant else None) == ranks
    assert intended_rank(environ) == rank


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_world_of_that_size_is_right_and_one_of_one_rank_wrong(launcher: str) -> None:
    environ, ranks, _ = LAUNCHERS[launcher]
    check_world(ranks or 1, "MPICH 5", environ)
    if ranks is None:
        check_world(1, "MPICH 5", environ)
    else:
        with pytest.raises(JobError, match=f"started {ranks} ranks but MPI sees a world of 1"):
            check_world(1, "MPICH 5", environ)


def test_the_message_names_launcher_variable_library_and_remedy() -> None:
    with pytest.raises(JobError) as raised:
        check_world(1, "Open MPI v5.0.7", SLURM_STEP)
    for part in ("srun (SLURM_STEP_NUM_TASKS)", "Open MPI v5.0.7", "--mpi=pmi2", "--mpi=pmix"):
        assert part in str(raised.value)
