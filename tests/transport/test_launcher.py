"""What the launchers leave in the environment, and worlds that are not what they started."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

import pytest

import programs
from hpcsgd.errors import JobError
from hpcsgd.transport.launcher import LAUNCHERS, Launched, check_world, launched
from training.launches import unlaunched

SLURM_STEP = {
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4",
    "SLURM_JOB_ID": "7",
}  # fmt: skip
PMI = {"PMI_SIZE": "4", "PMI_RANK": "2", "PMI_FD": "6"}
HYDRA = {**PMI, "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_RANK": "1",
}  # fmt: skip
FLUX = {"FLUX_JOB_SIZE": "4", "FLUX_TASK_RANK": "2", "FLUX_TASK_LOCAL_ID": "0", "FLUX_JOB_NNODES": "2"}
PALS = {
    "PALS_RANKID": "3", "PALS_LOCAL_RANKID": "1", "PMI_SIZE": "4", "PMI_RANK": "3", "PMI_LOCAL_RANK": "1",
    "PMI_LOCAL_SIZE": "2",
}  # fmt: skip
JSRUN = {
    "JSM_NAMESPACE_SIZE": "4", "JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "2",
}  # fmt: skip
MVAPICH = {
    "MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_RANK": "2", "MV2_COMM_WORLD_LOCAL_RANK": "0",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
ONE_HELPER_ON_EACH_NODE = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
# (environment, launcher, ranks it means, rank it means, that on the node, ranks on the node)
CASES = {
    "MPICH or Intel MPI": (HYDRA, "mpiexec of MPICH or Intel MPI (PMI_SIZE)", 4, 2, 0, 2),
    "PMI alone": (PMI, "mpiexec or srun with PMI (PMI_SIZE)", 4, 2, None, None),
    "Open MPI": (OPEN_MPI, "Open MPI's mpiexec (OMPI_COMM_WORLD_SIZE)", 4, 1, 1, 2),
    "prterun": ({"PMIX_RANK": "2"}, "a launcher with PMIx (PMIX_RANK)", None, 2, None, None),
    "MVAPICH": (MVAPICH, "MVAPICH's mpirun_rsh (MV2_COMM_WORLD_SIZE)", 4, 2, 0, 2),
    "jsrun": (JSRUN, "jsrun (JSM_NAMESPACE_SIZE)", 4, 1, 1, 2),
    "jsrun of Spectrum MPI": (JSRUN | OPEN_MPI, "jsrun (JSM_NAMESPACE_SIZE)", 4, 1, 1, 2),
    "flux run": (FLUX | PMI, "flux run (FLUX_JOB_SIZE)", 4, 2, 0, None),
    "flux run -o pmi=none": (FLUX, "flux run (FLUX_JOB_SIZE)", 4, 2, 0, None),
    "PALS": (PALS, "PALS, a Cray's mpiexec or srun --mpi=cray_shasta (PMI_SIZE)", 4, 3, 1, 2),
    "srun --mpi=pmi2": (
        SLURM_STEP | {"PMI_SIZE": "4", "PMI_RANK": "3"}, "mpiexec or srun with PMI (PMI_SIZE)", 4, 3, 1, None,
    ),
    "srun --mpi=pmix": (SLURM_STEP | {"PMIX_RANK": "3"}, "srun (SLURM_STEP_NUM_TASKS)", 4, 3, 1, None),
    "srun without --mpi": (SLURM_STEP, "srun (SLURM_STEP_NUM_TASKS)", 4, 3, 1, None),
    "MPICH's in a Slurm job": (
        HYDRA | ONE_HELPER_ON_EACH_NODE, "mpiexec of MPICH or Intel MPI (PMI_SIZE)", 4, 2, 0, 2,
    ),
    "one of PMI in a Slurm job": (
        PMI | ONE_HELPER_ON_EACH_NODE, "mpiexec or srun with PMI (PMI_SIZE)", 4, 2, None, None,
    ),
    "Open MPI's in a Slurm job": (
        OPEN_MPI | ONE_HELPER_ON_EACH_NODE, "Open MPI's mpiexec (OMPI_COMM_WORLD_SIZE)", 4, 1, 1, 2,
    ),
    "MPICH's by flux run": (
        HYDRA | {"FLUX_JOB_SIZE": "1", "FLUX_TASK_RANK": "0", "FLUX_TASK_LOCAL_ID": "0"},
        "mpiexec of MPICH or Intel MPI (PMI_SIZE)", 4, 2, 0, 2,
    ),
}  # fmt: skip
NONE = {
    "plain python": {},
    "python in a batch script, without srun": {
        "SLURM_NTASKS": "4",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
    },
    "something else entirely": {"PMI_SIZE": "", "SLURM_STEP_NUM_TASKS": "many", "PMIX_RANK": "x"},
}


@pytest.mark.parametrize("case", CASES)
def test_what_the_launcher_meant(case: str) -> None:
    environ, by, size, rank, local_rank, local_size = CASES[case]
    expected = Launched(by=by, size=size, rank=rank, local_rank=local_rank, local_size=local_size)
    assert launched(environ) == expected


@pytest.mark.parametrize("case", NONE)
def test_where_none_left_a_trace(case: str) -> None:
    assert launched(NONE[case]) is None
    check_world(1, "MPICH 5", NONE[case])


def test_every_launcher_has_a_case() -> None:
    """With all of its variables."""
    left = [set(environ) for environ, *_ in CASES.values()]
    assert [
        launcher.name for launcher in LAUNCHERS if not any(launcher.variables <= each for each in left)
    ] == []


@pytest.mark.parametrize("case", CASES)
def test_a_world_of_that_size_is_right_and_one_of_one_rank_wrong(case: str) -> None:
    environ, by, size, rank, *_ = CASES[case]
    check_world(4, "MPICH 5", environ)
    with pytest.raises(JobError) as raised:
        check_world(1, "MPICH 5", environ)
    started = f"rank {rank}" if size is None else f"{size} ranks"
    assert str(raised.value).startswith(f"{by} started {started} but MPI sees a world of 1: ")


def test_of_worlds_of_one_rank_a_single_one_tells() -> None:
    """The first that can know it."""

    def speak(environ: Mapping[str, str], variable: str) -> list[bool]:
        told = [launched({**environ, variable: str(rank)}) for rank in range(3)]
        return [each is not None and each.speaks for each in told]

    assert speak({"PMI_SIZE": "3"}, "PMI_RANK") == [True, False, False]
    assert speak({}, "PMIX_RANK") == [False, True, False]
    check_world(1, "MPICH 5", {"PMIX_RANK": "0"})


def test_the_message_names_launcher_variable_library_and_remedy() -> None:
    with pytest.raises(JobError) as raised:
        check_world(1, "Open MPI v5.0.7", SLURM_STEP)
    for part in ("srun (SLURM_STEP_NUM_TASKS)", "Open MPI v5.0.7", "--mpi=pmi2", "--mpi=pmix", "-o pmi="):
        assert part in str(raised.value)


TELLS = """
import json, os
from hpcsgd.transport.launcher import launched
told = launched(os.environ)
print(json.dumps([told.by, told.size, told.rank, told.local_rank, told.local_size]))
"""


@pytest.mark.slow
def test_the_mpiexec_that_is_here() -> None:
    command = [programs.mpiexec(), "-n", "3", sys.executable, "-c", TELLS]
    done = programs.run(command, env=unlaunched())
    told = sorted(json.loads(line) for line in done.stdout.splitlines())
    (by,) = {name for name, *_ in told}
    assert by in (CASES["MPICH or Intel MPI"][1], CASES["Open MPI"][1])
    assert [(size, rank, count) for _, size, rank, _, count in told] == [(3, rank, 3) for rank in range(3)]
    assert sorted(local for _, _, _, local, _ in told) == [0, 1, 2]
