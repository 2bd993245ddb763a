"""What every job of a site has in common: one small file, written once."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hpcsgd.config.reader import read_section, read_toml

PLACES = (Path(), Path("~", ".config", "hpcsgd"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where jobs go and how they start. Missing values are left to the scheduler's defaults."""

    scheduler: Literal["slurm", "pbs", "flux"] | None = None
    """Default: the one whose commands are here."""
    partition: str | None = None
    """The partition of Slurm, or the queue of the others."""
    account: str | None = None
    mpi: str = "pmi2"
    """`srun --mpi=`: pmi2 for MPICH, pmix for Open MPI, cray_shasta for Cray MPICH."""
    modules: tuple[str, ...] = ()
    """Modules to load before anything else."""
    setup: Path | None = None
    """A shell file to source after that."""
    sbatch: tuple[str, ...] = ()
    """Further options of sbatch, such as ``--constraint=gpu``."""
    srun: tuple[str, ...] = ()
    """Further options of srun."""
    cpu_bind: str = "cores"
    """`srun --cpu-bind=`: which cores a rank has, best near the GPU of its number."""
    gpu_bind: str | None = None
    """`srun --gpu-bind=`: which GPUs a rank sees."""
    mem_bind: str | None = None
    """`srun --mem-bind=`: the NUMA node of a rank's memory."""
    pack: Path | None = None
    """An environment packed by ``hpcsgd job pack``, whose Python starts the ranks."""
    local: str = "${TMPDIR:-/tmp}"
    """Where it is unpacked on each node, in the shell's notation."""
    environment: dict[str, str] = field(default_factory=dict[str, str])
    """Variables of all ranks, such as those that choose a network card."""
    qsub: tuple[str, ...] = ()
    """Further options of qsub, such as ``-l filesystems=home``."""
    mpiexec: tuple[str, ...] = ("mpiexec",)
    """The command that starts ranks under PBS, before ``-n``; {ranks_per_node} and {cpus_per_rank} are the
    job's."""
    flux_batch: tuple[str, ...] = ()
    """Further options of flux batch, such as ``--exclusive``."""
    flux_run: tuple[str, ...] = ()
    """Further options of flux run, such as ``-o`` and ``pmi=pmix``."""

    def bindings(self) -> list[str]:
        """Return srun's options for binding."""
        given = {"cpu-bind": self.cpu_bind, "gpu-bind": self.gpu_bind, "mem-bind": self.mem_bind}
        return [f"--{name}={value}" for name, value in given.items() if value is not None]

    def variables(self) -> list[str]:
        """Return the variables in the shell's form."""
        return [f"{name}={value}" for name, value in self.environment.items()]

    def options(self) -> dict[str, str]:
        """Return the options under sbatch's names."""
        given = {"partition": self.partition, "account": self.account}
        options = {name: value for name, value in given.items() if value is not None}
        for option in self.sbatch:
            name, _, value = option.removeprefix("--").partition("=")
            options[name] = value
        return options


def _candidates() -> list[Path]:
    return [place.expanduser() / "site.toml" for place in PLACES]


def load_site(path: Path | None) -> tuple[Site, Path | None]:
    """Return the site in ``path``, else in the first ``site.toml`` of `PLACES`, else one of defaults.

    Raises `UserError` naming file and key.
    """
    if path is None:
        path = next((file for file in _candidates() if file.exists()), None)
    return (Site(), None) if path is None else (read_section(Site, read_toml(path), path), path)
