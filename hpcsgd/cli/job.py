"""``hpcsgd job``: scripts for Slurm."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from hpcsgd.cli.user_errors import told_in_one_line

job = App(name="job", help="Make and submit batch jobs for Slurm.")
USAGE = "JOB [--nodes N] [--ranks-per-node N] [--time H:MM:SS] [--submit] [--SECTION.KEY VALUE]..."
Overrides = Annotated[str, Parameter(allow_leading_hyphen=True)]
Flag = Annotated[bool, Parameter(negative="")]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What every kind of job is asked."""

    nodes: int = 1
    "How many nodes."
    ranks_per_node: int = 1
    "How many ranks on each."
    cpus_per_rank: int = 1
    "Cores, and so threads, of each rank."
    gpus_per_node: int | None = None
    "How many GPUs of each node."
    time: str = "1:00:00"
    "How long one start may last, as sbatch reads it."
    partition: str | None = None
    "Where to run; else the site's."
    account: str | None = None
    "Who pays; else the site's."
    site: Path | None = None
    "What jobs here have in common; else ./site.toml or ~/.config/hpcsgd/site.toml."
    after: str | None = None
    "Start after the job of this number has ended well."
    submit: Flag = False
    "Put it into the queue, too."


@job.command(usage=f"Usage: hpcsgd job train {USAGE}")
def train(path: Path, /, *overrides: Overrides, resume: Flag = False, wanted: Wanted | None = None) -> None:
    """Write a script that trains to the end, with restarts; nothing is asked for before it is checked.

    :param path: The job file, as for hpcsgd train.
    :param overrides: Keys of the file to change, as in --training.epochs 3.
    :param resume: Go on from the last checkpoint in the run folder.
    """
    _make("train", path, overrides, wanted or Wanted(), resume)


@job.command(usage=f"Usage: hpcsgd job bench {USAGE}")
def bench(path: Path, /, *overrides: Overrides, wanted: Wanted | None = None) -> None:
    """Write a script that looks at the allocation with hpcsgd doctor and trains for two minutes.

    :param path: The job file, as for hpcsgd train.
    :param overrides: Keys of the file to change, as in --job.groups 8.
    """
    _make("bench", path, overrides, wanted or Wanted(), resume=False)


def _make(kind: str, path: Path, overrides: tuple[str, ...], wanted: Wanted, resume: bool) -> None:
    with told_in_one_line():
        from hpcsgd.batch import Allocation, estimate, load_site, prepare, submit

        allocation = Allocation(
            nodes=wanted.nodes,
            ranks_per_node=wanted.ranks_per_node,
            cpus_per_rank=wanted.cpus_per_rank,
            gpus_per_node=wanted.gpus_per_node,
            time=wanted.time,
        )
        site, source = load_site(wanted.site)
        here = {"partition": wanted.partition or site.partition, "account": wanted.account or site.account}
        order = prepare(
            kind, path, overrides, allocation, replace(site, **here), resume=resume, after=wanted.after
        )
        print(order)
        print(f"site      {source or 'no site.toml: the defaults of Slurm, --mpi=' + site.mpi}")
        print(f"slurm     {estimate(order.script) or 'not here: not asked whether it would take the job'}")
        if wanted.submit:
            print(f"submitted as job {submit(order.script)}")
        else:
            print(f"submit    sbatch {order.script}")
