"""What launchers leave in the environment of each rank: how many they started, and which of them this is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpcsgd.errors import JobError, count_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """The variables in which one tells a rank its numbers; None where it has none for that."""

    name: str
    size: str | None
    rank: str
    local_rank: str | None = None
    """Its number on its node."""
    local_size: str | None = None
    """How many there are on its node."""
    mark: str | None = None
    """A variable that has to be there, too, where others leave the same size and rank."""
    of_mpi: bool = True
    """Whether the processes that it starts can be one world of MPI."""
    source: str
    """Where that can be read."""

    @property
    def variables(self) -> set[str]:
        """All that it leaves."""
        names = (self.size, self.rank, self.local_rank, self.local_size, self.mark)
        return {name for name in names if name is not None}


AGENT = "TORCHELASTIC_RUN_ID"
"""Left by torchrun's agents, which look after the ranks that they have started."""
TORCH_RANK, TORCH_SIZE, ADDRESS, PORT = "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
"""torch.distributed's own, whoever sets them: which rank this is, of how many, and where they meet."""

# In order of precedence: a launcher may start another one, whose ranks then know the numbers of both. Those
# that may run inside of another come before it.
LAUNCHERS = (
    Launcher(
        name="torchrun",  # and accelerate, which starts it
        size=TORCH_SIZE,
        rank=TORCH_RANK,
        local_rank="LOCAL_RANK",
        local_size="LOCAL_WORLD_SIZE",
        mark=AGENT,
        of_mpi=False,
        source="https://docs.pytorch.org/docs/stable/elastic/run.html",
    ),
    Launcher(
        name="jsrun",  # before Open MPI, whose variables Spectrum MPI leaves, too
        size="JSM_NAMESPACE_SIZE",
        rank="JSM_NAMESPACE_RANK",
        local_rank="JSM_NAMESPACE_LOCAL_RANK",
        local_size="JSM_NAMESPACE_LOCAL_SIZE",  # not on that page, but in programs that were run there
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
    """What this rank was told."""

    launcher: Launcher
    size: int | None
    rank: int
    local_rank: int | None
    local_size: int | None

    @property
    def variable(self) -> str:
        """The variable that the launcher is known by."""
        return self.launcher.size or self.launcher.rank

    @property
    def by(self) -> str:
        """The launcher, and that variable."""
        return f"{self.launcher.name} ({self.variable})"

    def fits(self, size: int) -> bool:
        """Whether this may be a rank of a world of that `size`."""
        return self.size == size or (self.size is None and self.rank < size)

    @property
    def speaks(self) -> bool:
        """Whether this is the one that tells, where each finds itself alone: 0, if it knows of others."""
        return self.rank == (0 if self.size is not None else 1)


def launched(environ: Mapping[str, str], size: int | None = None) -> Launched | None:
    """What the launcher of this rank told it; None where none left a trace. Where MPI's world is known to
    have a `size`, a launcher that meant that many ranks comes first.

    What the first one does not say, another one may that means the same ranks: `srun --mpi=pmi2` leaves size
    and rank in the words of PMI, and the number on the node in Slurm's.
    """
    told = all_said(environ)
    if not told:
        return None
    if size is not None:
        told.sort(key=lambda said: not said.fits(size))
    same = [said for said in told if (said.size, said.rank) == (told[0].size, told[0].rank)]
    return Launched(
        launcher=told[0].launcher,
        size=told[0].size,
        rank=told[0].rank,
        local_rank=next((said.local_rank for said in same if said.local_rank is not None), None),
        local_size=next((said.local_size for said in same if said.local_size is not None), None),
    )


def misfit(size: int, environ: Mapping[str, str]) -> Launched | None:
    """Return what a launcher told this rank that cannot be, since MPI's world has that `size`.

    Several may have left something: a shell on a node is started by one, too. Where MPI joins several
    processes, one of the launchers has started them, and the others do not count. Where each finds itself
    alone, all of them have to have meant it.
    """
    told = all_said(environ)
    if size > 1 and any(said.fits(size) for said in told):
        return None
    return next((said for said in told if not said.fits(size)), None)


def all_said(environ: Mapping[str, str]) -> list[Launched]:
    """By each launcher that left a trace; those that say how many ranks they started come first."""
    told = [said for launcher in LAUNCHERS if (said := _said(launcher, environ)) is not None]
    return sorted(told, key=lambda said: said.size is None)


def _said(launcher: Launcher, environ: Mapping[str, str]) -> Launched | None:
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

    A launcher and an MPI library that do not fit each other give N worlds of one rank, each training alone
    and overwriting the others' results.
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
