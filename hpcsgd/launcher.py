"""Environment variables that launchers set for each rank: the number of ranks, and which one this is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpcsgd.errors import JobError, count_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """The names of the environment variables in which a launcher gives each rank its numbers.

    The numbers are world size, rank, local rank and local size. A name is None if the launcher does not set
    such a variable.
    """

    name: str
    size: str | None
    rank: str
    local_rank: str | None = None
    """Variable with the rank's number on its node."""
    local_size: str | None = None
    """Variable with the number of ranks on its node."""
    mark: str | None = None
    """A variable that must also be set, if other launchers use the same names for size and rank."""
    of_mpi: bool = True
    """True if the processes that the launcher starts can be one world of MPI."""
    source: str
    """Where the variables are documented."""

    @property
    def variables(self) -> set[str]:
        """The names of all environment variables that this launcher sets."""
        names = (self.size, self.rank, self.local_rank, self.local_size, self.mark)
        return {name for name in names if name is not None}


AGENT = "TORCHELASTIC_RUN_ID"
"""A variable that torchrun's agents set. They supervise the ranks that they have started."""
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""torchrun's variable for how many times its agents have started all ranks again."""
TORCH_RANK, TORCH_SIZE, ADDRESS, PORT = "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
"""torch.distributed's own variables, whatever sets them: rank, world size, and the address to connect to."""
LOCAL_RANK, LOCAL_SIZE = "LOCAL_RANK", "LOCAL_WORLD_SIZE"
"""torchrun's variables for the rank's number on its node, and the number of ranks there."""


def as_torchrun_sets(rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
    """Return the variables of this rank that torchrun would set, for libraries that read no others."""
    numbers = {TORCH_RANK: rank, TORCH_SIZE: size, LOCAL_RANK: local_rank, LOCAL_SIZE: local_size}
    return {name: str(number) for name, number in numbers.items()}


# In order of precedence: a launcher may start another one, whose ranks then have the variables of both. A
# launcher that may run inside another one comes before it.
LAUNCHERS = (
    Launcher(
        name="torchrun",  # and accelerate, which starts it
        size=TORCH_SIZE,
        rank=TORCH_RANK,
        local_rank=LOCAL_RANK,
        local_size=LOCAL_SIZE,
        mark=AGENT,
        of_mpi=False,
        source="https://docs.pytorch.org/docs/stable/elastic/run.html",
    ),
    Launcher(
        name="jsrun",  # before Open MPI, whose variables Spectrum MPI sets, too
        size="JSM_NAMESPACE_SIZE",
        rank="JSM_NAMESPACE_RANK",
        local_rank="JSM_NAMESPACE_LOCAL_RANK",
        local_size="JSM_NAMESPACE_LOCAL_SIZE",  # not in `source`, but used in programs for jsrun
        source="https://lightning.ai/docs/pytorch/stable/api/"
        "lightning.pytorch.plugins.environments.LSFEnvironment.html",
    ),
    Launcher(
        name="Open MPI's mpiexec",
        size="OMPI_COMM_WORLD_SIZE",
        rank="OMPI_COMM_WORLD_RANK",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        source="https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html",
    ),
    Launcher(
        name="MVAPICH's mpirun_rsh",
        size="MV2_COMM_WORLD_SIZE",
        rank="MV2_COMM_WORLD_RANK",
        local_rank="MV2_COMM_WORLD_LOCAL_RANK",
        local_size="MV2_COMM_WORLD_LOCAL_SIZE",
        source="MVAPICH2, src/pm/mpirun/mpispawn.c",
    ),
    Launcher(
        name="mpiexec of MPICH or Intel MPI",
        size="PMI_SIZE",
        rank="PMI_RANK",
        local_rank="MPI_LOCALRANKID",
        local_size="MPI_LOCALNRANKS",
        mark="MPI_LOCALRANKID",
        source="printed by ranks of MPICH 5.0 and of Intel MPI 2021, which share Hydra",
    ),
    Launcher(
        name="flux run",
        size="FLUX_JOB_SIZE",
        rank="FLUX_TASK_RANK",
        local_rank="FLUX_TASK_LOCAL_ID",
        source="https://flux-framework.readthedocs.io/projects/flux-core/en/latest/man7/flux-environment.html",
    ),
    Launcher(
        name="PALS, a Cray's mpiexec or srun --mpi=cray_shasta",
        size="PMI_SIZE",
        rank="PALS_RANKID",
        local_rank="PALS_LOCAL_RANKID",
        local_size="PMI_LOCAL_SIZE",
        mark="PALS_RANKID",
        source="Slurm, src/plugins/mpi/cray_shasta/mpi_cray_shasta.c; pals.h of HPE",
    ),
    Launcher(
        name="mpiexec or srun with PMI",
        size="PMI_SIZE",
        rank="PMI_RANK",
        source="https://flux-framework.readthedocs.io/projects/flux-rfc/en/latest/spec_13.html",
    ),
    Launcher(
        name="srun",
        size="SLURM_STEP_NUM_TASKS",
        rank="SLURM_PROCID",
        local_rank="SLURM_LOCALID",
        source="https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES",
    ),
    Launcher(
        name="a launcher with PMIx",
        size=None,
        rank="PMIX_RANK",
        source="printed by ranks of prterun without the personality of Open MPI",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """The world size, rank, local rank and local size that a launcher gave this rank; None if not given."""

    launcher: Launcher
    size: int | None
    rank: int
    local_rank: int | None
    local_size: int | None

    @property
    def variable(self) -> str:
        """The variable by which the launcher is recognized."""
        return self.launcher.size or self.launcher.rank

    @property
    def by(self) -> str:
        """The launcher's name, with `variable`, for messages."""
        return f"{self.launcher.name} ({self.variable})"

    def fits(self, size: int) -> bool:
        """Return whether these can be the numbers of a rank in a world of `size` ranks."""
        return self.size == size or (self.size is None and self.rank < size)

    @property
    def speaks(self) -> bool:
        """True if this rank prints errors while ranks are not connected: rank 0, or 1 if size is unknown.

        Without a size, rank 0 of a world of one rank cannot know that other ranks were started.
        """
        return self.rank == (0 if self.size is not None else 1)


def launched(environ: Mapping[str, str], size: int | None = None) -> Launched | None:
    """Return the world size, rank and local numbers that a launcher gave this rank; None if there is none.

    If several launchers set variables, the first of `LAUNCHERS` counts. If MPI's world is known to have a
    `size`, a launcher with that many ranks is preferred. Numbers that this launcher does not give come from
    launchers that gave the same size and rank. For example, `srun --mpi=pmi2` sets size and rank in PMI's
    variables, and the number on the node in Slurm's.
    """
    reported = all_reported(environ)
    if not reported:
        return None
    if size is not None:
        reported.sort(key=lambda given: not given.fits(size))
    same = [given for given in reported if (given.size, given.rank) == (reported[0].size, reported[0].rank)]
    return Launched(
        launcher=reported[0].launcher,
        size=reported[0].size,
        rank=reported[0].rank,
        local_rank=next((given.local_rank for given in same if given.local_rank is not None), None),
        local_size=next((given.local_size for given in same if given.local_size is not None), None),
    )


def misfit(size: int, environ: Mapping[str, str]) -> Launched | None:
    """Return a launcher whose world size or rank contradicts MPI's world of `size` ranks; None if none does.

    The result has all numbers that this launcher set in `environ`. Several launchers may have set variables
    there, because one may have started the shell in which another one runs. So in a world of several ranks,
    there is no contradiction if the numbers of any launcher fit. In a world of one rank, those of every
    launcher must fit.
    """
    reported = all_reported(environ)
    if size > 1 and any(given.fits(size) for given in reported):
        return None
    return next((given for given in reported if not given.fits(size)), None)


def all_reported(environ: Mapping[str, str]) -> list[Launched]:
    """Return the numbers that each launcher set in `environ`; launchers with a world size come first."""
    reported = [given for launcher in LAUNCHERS if (given := _reported(launcher, environ)) is not None]
    return sorted(reported, key=lambda given: given.size is None)


def _reported(launcher: Launcher, environ: Mapping[str, str]) -> Launched | None:
    def number(name: str | None) -> int | None:
        value = "" if name is None else environ.get(name, "")
        return int(value) if value.isdigit() else None

    size, rank = number(launcher.size), number(launcher.rank)
    if (size if launcher.size else rank) is None or (launcher.mark and not environ.get(launcher.mark)):
        return None
    return Launched(
        launcher=launcher,
        size=size,
        rank=rank or 0,
        local_rank=number(launcher.local_rank),
        local_size=number(launcher.local_size),
    )


def check_world(size: int, library: str, environ: Mapping[str, str]) -> None:
    """Raise `JobError` unless MPI sees as many ranks as were started.

    If a launcher and an MPI library do not fit each other, there are N worlds of one rank. Each would train
    alone and overwrite the others' results.
    """
    meant = misfit(size, environ)
    if meant is None:
        return
    started = f"rank {meant.rank}" if meant.size is None else count_text(meant.size, "rank")
    if not meant.launcher.of_mpi:
        raise JobError(
            f"{meant.by} started {started} but MPI sees a world of {size}: that is no launcher of MPI. Use "
            f'mpiexec -n {meant.size} or srun, or the backend "auto" or "gloo"'
        )
    alone = "" if size > 1 else f". To train alone in a shell that it started: env -u {meant.variable} …"
    raise JobError(
        f"{meant.by} started {started} but MPI sees a world of {size}: the launcher does not fit the MPI "
        f"library ({library}). Use that library's own mpiexec, or srun with a matching --mpi= (MPICH: "
        "--mpi=pmi2, Open MPI: --mpi=pmix), or flux run with a matching -o pmi= (simple, pmix)"
        f"{alone}"
    )
