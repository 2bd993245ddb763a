"""The supported batch systems (schedulers), and the form in which each expects a job's options."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from hpcsgd.cluster.batch.allocation import Allocation, seconds
from hpcsgd.cluster.batch.script import SBATCH, Directives, name_and_value
from hpcsgd.cluster.batch.site import Site
from hpcsgd.errors import UserError, count_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The request of a job, in the same form for all schedulers."""

    name: str
    folder: Path
    """The working directory of the job."""
    log: Path
    """The path of the log, without a suffix."""
    script: Path
    after: str | None
    """The number of the job that has to succeed before this job starts; None if there is none."""
    allocation: Allocation
    site: Site
    tasks: int | None = None
    """The number of tasks of a job array, each of which gets `allocation`; None for a single job."""


Values = Mapping[str, str | Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduler:
    """A batch system, with its own templates in ``jobs/``."""

    name: str
    title: str
    suffix: str
    """The suffix of the scheduler's templates and scripts."""
    directives: Directives
    options: Callable[[Order], Mapping[str, str]]
    """A function that returns the scheduler's options for a job, by name."""
    values: Callable[[Order], Values]
    """A function that returns, for a job, the values that only this scheduler's templates have."""
    submits: tuple[str, ...]
    """The command that submits a script, if the script's path is added to it; prints the job's number."""
    tries: tuple[str, ...] | None
    """The command that reports, with the script's path added, whether a script is accepted; or None."""
    starting: str
    """The command that starts ranks by default, as text for the user."""
    kinds: Mapping[str, str]
    """The name of the template, without suffix, for each kind of job."""

    @property
    def is_here(self) -> bool:
        return shutil.which(self.submits[0]) is not None

    def template(self, kind: str) -> str:
        """Return the file name of the template for this `kind` of job, or raise `UserError`."""
        if kind not in self.kinds:
            raise UserError(
                f"scheduler = {self.name!r}: no script for hpcsgd job {kind}; there are some for "
                f"{', '.join(sorted(self.kinds))}"
            )
        return self.kinds[kind] + self.suffix


def _sbatch(order: Order) -> dict[str, str]:
    return {
        "job-name": order.name,
        "chdir": str(order.folder),
        "output": f"{order.log}-{'%j' if order.tasks is None else '%A_%a'}.log",
        **({} if order.tasks is None else {"array": f"0-{order.tasks - 1}"}),
        **({} if order.after is None else {"dependency": f"afterok:{order.after}"}),
        **order.allocation.options(),
        **order.site.options(),
    }


def _with_srun(order: Order) -> Values:
    site = order.site
    return {"MPI": site.mpi, "BIND": site.bindings(), "SRUN": site.srun}


def _qsub(order: Order) -> dict[str, str]:
    a, site = order.allocation, order.site
    chunk = {
        "ncpus": a.ranks_per_node * a.cpus_per_rank,
        "mpiprocs": a.ranks_per_node,
        "ompthreads": a.cpus_per_rank,
        "ngpus": a.gpus_on_node,
    }
    asked = [f"{name}={count}" for name, count in chunk.items() if count]
    minutes, rest = divmod(seconds(a.time), 60)
    given = {"q": site.partition, "A": site.account}
    return {
        "N": re.sub(r"\s", "_", order.name),
        "l select": ":".join([str(a.nodes), *asked]),
        "l walltime": f"{minutes // 60}:{minutes % 60:02}:{rest:02}",
        "o": f"{order.log}.out",
        **({} if order.after is None else {"W depend": f"afterok:{order.after}"}),
        **{name: value for name, value in given.items() if value is not None},
        **dict(_one_dash(option) for option in site.qsub),
    }


def _one_dash(option: str) -> tuple[str, str]:
    """Return the name and value of an option such as ``-q long`` or ``-l place=excl``."""
    name, _, value = option.removeprefix("-").partition(" ")
    key, equals, rest = value.partition("=")
    return (f"{name} {key}", rest) if equals else (name, value)


def _with_mpiexec(order: Order) -> Values:
    a = order.allocation
    numbers = {"ranks_per_node": a.ranks_per_node, "cpus_per_rank": a.cpus_per_rank}
    try:
        command = [word.format_map(numbers) for word in order.site.mpiexec]
    except (KeyError, ValueError, IndexError, AttributeError):
        raise UserError(
            f"mpiexec = {list(order.site.mpiexec)}: in braces there are {', '.join(numbers)}"
        ) from None
    return {**_again(order), "MPIEXEC": command}


def _flux_batch(order: Order) -> dict[str, str]:
    a, site = order.allocation, order.site
    given = {"gpus-per-slot": _gpus_of_rank(a), "queue": site.partition, "bank": site.account}
    after = None if order.after is None else f"afterok:{order.after}"
    options = {
        "job-name": order.name,
        "cwd": str(order.folder),
        "output": f"{order.log}.out",
        "nodes": str(a.nodes),
        "nslots": str(a.ranks),
        "cores-per-slot": str(a.cpus_per_rank),
        "time-limit": f"{seconds(a.time)}s",
        **{name: value for name, value in (given | {"dependency": after}).items() if value is not None},
    }
    return options | dict(map(name_and_value, site.flux_batch))


def _gpus_of_rank(a: Allocation) -> str | None:
    if a.gpus_on_node is None:
        return None
    if a.gpus_on_node % a.ranks_per_node:
        raise UserError(
            f"--gpus-per-node {a.gpus_on_node}: Flux gives each rank as many: a multiple of the "
            f"{count_text(a.ranks_per_node, 'rank')} of a node"
        )
    return str(a.gpus_on_node // a.ranks_per_node)


def _with_flux_run(order: Order) -> Values:
    gpus = _gpus_of_rank(order.allocation)
    words = [] if gpus is None else [f"--gpus-per-task={gpus}"]
    return {
        **_again(order),
        "NODES": str(order.allocation.nodes),
        "FLUX_RUN": [*words, *order.site.flux_run],
    }


def _again(order: Order) -> Values:
    """Return the values with which a script can submit itself again."""
    a = order.allocation
    return {"SCRIPT": str(order.script), "RANKS": str(a.ranks), "CORES": str(a.cpus_per_rank)}


_TRAININGS = MappingProxyType({"train": "train", "compare": "train"})
_SLURM = Scheduler(
    name="slurm",
    title="Slurm",
    suffix=".sbatch",
    directives=SBATCH,
    options=_sbatch,
    values=_with_srun,
    submits=("sbatch", "--parsable"),
    tries=("sbatch", "--test-only"),
    starting="srun --mpi=pmi2",
    kinds=_TRAININGS | {kind: kind for kind in ("ensemble", "replica_group", "probe", "bench", "measure")},
)
_PBS = Scheduler(
    name="pbs",
    title="PBS",
    suffix=".pbs",
    directives=Directives("#PBS", "-"),
    options=_qsub,
    values=_with_mpiexec,
    submits=("qsub",),
    tries=None,
    starting="mpiexec",
    kinds=_TRAININGS,
)
_FLUX = Scheduler(
    name="flux",
    title="Flux",
    suffix=".flux",
    directives=Directives("# flux:", "--"),
    options=_flux_batch,
    values=_with_flux_run,
    submits=("flux", "batch"),
    tries=None,
    starting="flux run",
    kinds=_TRAININGS,
)
SCHEDULERS = {scheduler.name: scheduler for scheduler in (_SLURM, _PBS, _FLUX)}


def scheduler_of(site: Site) -> Scheduler:
    """Return the scheduler that `site` names, else the one whose commands are installed, else Slurm.

    Scripts can be made on any machine, even without a scheduler. Raises `UserError` if several are installed.
    """
    if site.scheduler is not None:
        return SCHEDULERS[site.scheduler]
    here = [scheduler for scheduler in SCHEDULERS.values() if scheduler.is_here]
    if len(here) > 1:
        commands = " and ".join(scheduler.submits[0] for scheduler in here)
        names = ", ".join(scheduler.name for scheduler in here)
        raise UserError(f"{commands} are both here: say in site.toml which scheduler is meant: {names}")
    return here[0] if here else _SLURM
