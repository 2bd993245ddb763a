"""The settings that all jobs of a site share, in a file ``site.toml`` that is written once."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hpcsgd.cluster.batch.script import name_and_value
from hpcsgd.config.reader import read_section, read_toml

PLACES = (Path(), Path("~", ".config", "hpcsgd"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """The content of ``site.toml``. For missing values the scheduler's defaults apply."""

    scheduler: Literal["slurm", "pbs", "flux"] | None = None
    """Default: the one whose commands are installed."""
    partition: str | None = None
    """The partition of Slurm, or the queue of PBS or Flux."""
    account: str | None = None
    mpi: str = "pmi2"
    """`srun --mpi=`: pmi2 for MPICH, pmix for Open MPI, cray_shasta for Cray MPICH."""
    modules: tuple[str, ...] = ()
    """Environment modules to load first."""
    setup: Path | None = None
    """A shell file to source after loading the modules."""
    sbatch: tuple[str, ...] = ()
    """Further options of sbatch, such as ``--constraint=gpu``."""
    srun: tuple[str, ...] = ()
    """Further options of srun."""
    cpu_bind: str = "cores"
    """`srun --cpu-bind=`: which cores a rank has; cores near its GPU are best."""
    gpu_bind: str | None = None
    """`srun --gpu-bind=`: which GPUs a rank sees."""
    mem_bind: str | None = None
    """`srun --mem-bind=`: the NUMA node of a rank's memory."""
    pack: Path | None = None
    """An environment packed by ``hpcsgd job pack``, whose Python starts the ranks."""
    local: str = "${TMPDIR:-/tmp}"
    """The folder in which each node unpacks `pack`; it may contain variables of the shell."""
    environment: dict[str, str] = field(default_factory=dict[str, str])
    """Environment variables of all ranks, such as for choosing a network card."""
    qsub: tuple[str, ...] = ()
    """Further options of qsub, such as ``-l filesystems=home``."""
    mpiexec: tuple[str, ...] = ("mpiexec",)
    """The command that starts ranks under PBS, before ``-n``.

    It may contain {ranks_per_node} and {cpus_per_rank}.
    """
    flux_batch: tuple[str, ...] = ()
    """Further options of flux batch, such as ``--exclusive``."""
    flux_run: tuple[str, ...] = ()
    """Further options of flux run, such as ``-o`` and ``pmi=pmix``."""

    def bindings(self) -> list[str]:
        """Return srun's options for binding ranks to cores, GPUs and memory."""
        given = {"cpu-bind": self.cpu_bind, "gpu-bind": self.gpu_bind, "mem-bind": self.mem_bind}
        return [f"--{name}={value}" for name, value in given.items() if value is not None]

    def variables(self) -> list[str]:
        """Return the environment variables as NAME=VALUE."""
        return [f"{name}={value}" for name, value in self.environment.items()]

    def options(self) -> dict[str, str]:
        """Return the site's options of sbatch, by name."""
        given = {"partition": self.partition, "account": self.account}
        options = {name: value for name, value in given.items() if value is not None}
        return options | dict(map(name_and_value, self.sbatch))


def _candidates() -> list[Path]:
    return [place.expanduser() / "site.toml" for place in PLACES]


def load_site(path: Path | None) -> tuple[Site, Path | None]:
    """Return the site, and the file that describes it, or None.

    The file is ``path``, or else the first ``site.toml`` in `PLACES`. Without a file the site has defaults.
    Raises `UserError`, which names the file and key.
    """
    if path is None:
        path = next((file for file in _candidates() if file.exists()), None)
    return (Site(), None) if path is None else (read_section(Site, read_toml(path), path), path)
