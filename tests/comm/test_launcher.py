"""Tests of the variables that launchers set, and of worlds that differ from what was started."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

import pytest

import programs
from hpcsgd.errors import JobError
from hpcsgd.launcher import LAUNCHERS, check_world, launched, misfit
from train.launches import unlaunched

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
TORCHRUN = {
    "WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
ONE_HELPER_ON_EACH_NODE = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
# (environment, launcher, number of ranks, rank, rank on the node, number of ranks on the node)
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
    "torchrun": (TORCHRUN, "torchrun (WORLD_SIZE)", 4, 3, 1, 2),
    "torchrun by srun, one on each node": (
        TORCHRUN | ONE_HELPER_ON_EACH_NODE, "torchrun (WORLD_SIZE)", 4, 3, 1, 2,
    ),
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
    told = launched(environ)
    assert told is not None
    found = told.by, told.size, told.rank, told.local_rank, told.local_size
    assert found == (by, size, rank, local_rank, local_size)


@pytest.mark.parametrize("case", NONE)
def test_where_none_left_a_trace(case: str) -> None:
    assert launched(NONE[case]) is None
    check_world(1, "MPICH 5", NONE[case])


def test_every_launcher_has_a_case() -> None:
    """The case sets all variables that identify the launcher."""
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
    """If several ranks each see a world of one, the first that can tell this prints the message."""

    def speak(environ: Mapping[str, str], variable: str) -> list[bool]:
        told = [launched({**environ, variable: str(rank)}) for rank in range(3)]
        return [each is not None and each.speaks for each in told]

    assert speak({"PMI_SIZE": "3"}, "PMI_RANK") == [True, False, False]
    assert speak({}, "PMIX_RANK") == [False, True, False]
    check_world(1, "MPICH 5", {"PMIX_RANK": "0"})


ONE = {
    "a shell of Open MPI": {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
    "a larger shell of Open MPI": {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "0"},
    "a batch script of jsrun": {"JSM_NAMESPACE_SIZE": "1", "JSM_NAMESPACE_RANK": "0"},
    "a shell of MVAPICH": {"MV2_COMM_WORLD_SIZE": "1", "MV2_COMM_WORLD_RANK": "0"},
    "a shell of srun": {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
    "a script of torchrun": {**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"},
}
"""Variables of an outer launcher, in whose environment the launcher that counts starts its ranks."""


@pytest.mark.parametrize("fitting", [HYDRA, PMI, OPEN_MPI, SLURM_STEP], ids=str)
@pytest.mark.parametrize("around", ONE)
def test_a_launcher_around_the_one_that_fits_does_not_count(around: str, fitting: Mapping[str, str]) -> None:
    environ = {**ONE[around], **fitting}
    check_world(4, "MPICH 5", environ)
    told, alone = launched(environ, 4), launched(fitting)
    assert told is not None
    assert alone is not None
    assert (told.size, told.rank) == (4, alone.rank)
    assert told.local_rank == alone.local_rank


@pytest.mark.parametrize("around", ["a shell of Open MPI", "a batch script of jsrun"])
def test_worlds_of_one_rank_are_seen_behind_a_launcher_of_one(around: str) -> None:
    """If `srun` starts four ranks that MPI does not connect, each of them would train alone."""
    environ = {**ONE[around], **SLURM_STEP}
    with pytest.raises(JobError, match=r"^srun \(SLURM_STEP_NUM_TASKS\) started 4 ranks"):
        check_world(1, "MPICH 5", environ)
    told = misfit(1, environ)
    assert told is not None
    assert not told.speaks  # it is rank 3


def test_how_to_train_alone_in_a_shell_of_many() -> None:
    with pytest.raises(JobError, match=r"To train alone .*: env -u SLURM_STEP_NUM_TASKS …$"):
        check_world(1, "MPICH 5", SLURM_STEP)
    check_world(1, "MPICH 5", {k: v for k, v in SLURM_STEP.items() if k != "SLURM_STEP_NUM_TASKS"})
    with pytest.raises(JobError) as raised:
        check_world(2, "MPICH 5", SLURM_STEP)
    assert "alone" not in str(raised.value)


def test_torchrun_is_refused_where_the_backend_is_mpi() -> None:
    with pytest.raises(JobError, match=r'Use mpiexec -n 4 or srun, or the backend "auto" or "gloo"$'):
        check_world(1, "MPICH 5", TORCHRUN)
    own = {"WORLD_SIZE": "4", "RANK": "3"}  # some scripts set these for torch under any launcher
    check_world(1, "MPICH 5", own)


def test_the_message_names_launcher_variable_library_and_remedy() -> None:
    with pytest.raises(JobError) as raised:
        check_world(1, "Open MPI v5.0.7", SLURM_STEP)
    for part in ("srun (SLURM_STEP_NUM_TASKS)", "Open MPI v5.0.7", "--mpi=pmi2", "--mpi=pmix", "-o pmi="):
        assert part in str(raised.value)


def test_programs_of_tests_keep_permissions_and_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise Open MPI starts nothing for root, or more ranks than cores."""
    allowed = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    for name, value in {**allowed, **OPEN_MPI}.items():
        monkeypatch.setenv(name, value)
    found = unlaunched()
    assert allowed.items() <= found.items()
    assert not OPEN_MPI.keys() & found.keys()


TELLS = """
import json, os
from hpcsgd.launcher import launched
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
