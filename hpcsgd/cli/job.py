"""``hpcsgd job``: scripts for Slurm, PBS and Flux."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from hpcsgd.cli.compare import Compared
from hpcsgd.cli.user_errors import errors_in_one_line
from hpcsgd.cli.words import JobKeys

if TYPE_CHECKING:
    from hpcsgd.cluster.batch import Allocation, Checked

job = App(name="job", help="Make and submit batch jobs for Slurm, PBS or Flux.")
USAGE = "JOB [--nodes N] [--ranks-per-node N] [--time H:MM:SS] [--submit] [--SECTION.KEY VALUE]..."
Flag = Annotated[bool, Parameter(negative="")]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class TopologyRequest:
    """The options of all commands that write the script of a batch job.

    They say which nodes, cores, GPUs and time the batch job requests, and how it is submitted.
    """

    nodes: int = 1
    "How many nodes."
    ranks_per_node: int = 1
    "How many ranks on each node."
    cpus_per_rank: int = 1
    "Cores, and therefore threads, of each rank."
    gpus_per_node: int | None = None
    "GPUs of each node; rank i of a node uses GPU i."
    gpus_per_rank: int | None = None
    "GPUs for each rank, in place of GPUs of each node."
    time: str = "1:00:00"
    "The time limit of one start, in sbatch's notation."
    partition: str | None = None
    "Where to run, a queue for PBS and Flux; default: the site's."
    account: str | None = None
    "The account to charge; default: the site's."
    site: Path | None = None
    "The file with settings of all jobs here; default: ./site.toml or ~/.config/hpcsgd/site.toml."
    after: str | None = None
    "Start after the job with this number has succeeded."
    submit: Flag = False
    "Also submit the job."

    def allocation(self) -> Allocation:
        """Return the nodes, ranks, GPUs and time to request. Raises `UserError` if no job can get them."""
        from hpcsgd.cluster.batch import Allocation

        return Allocation(
            nodes=self.nodes,
            ranks_per_node=self.ranks_per_node,
            cpus_per_rank=self.cpus_per_rank,
            gpus_per_node=self.gpus_per_node,
            gpus_per_rank=self.gpus_per_rank,
            time=self.time,
        )


@job.command(usage=f"Usage: hpcsgd job train {USAGE}")
def train(
    path: Path,
    /,
    *overrides: JobKeys,
    resume: Flag = False,
    probe: Path | None = None,
    plan: Path | None = None,
    wanted: TopologyRequest | None = None,
) -> None:
    """Write a script that trains to the end, with restarts; the job is checked first.

    :param path: The job file, as for hpcsgd train.
    :param overrides: Keys of the file to change, such as --training.epochs 3.
    :param resume: Continue from the last checkpoint in the run folder.
    :param probe: A probe.json, which gives the number of groups; with --after, it may not exist yet.
    :param plan: A plan.json, which gives the number of nodes; use hpcsgd plan --write for the job file.
    """
    with errors_in_one_line(path, overrides):
        from hpcsgd.cluster.batch import check_training

        w = wanted or TopologyRequest()
        if plan is not None:
            from hpcsgd.performance.planning.job_file import nodes_of

            nodes, ranks_per_node = nodes_of(plan, path, overrides)
            w = replace(w, nodes=nodes, ranks_per_node=ranks_per_node)
        awaited = w.after is not None
        checked = check_training(
            path, overrides, w.allocation(), fresh=not resume, probe=probe, awaited=awaited
        )
        words = [*(["--resume"] if resume else []), *(["--probe", str(probe)] if probe else [])]
        _write("train", [str(path), *overrides, *words], checked, w)


@job.command(usage=f"Usage: hpcsgd job compare {USAGE} --methods METHODS")
def compare(
    path: Path,
    /,
    *overrides: JobKeys,
    compared: Compared,
    resume: Flag = False,
    wanted: TopologyRequest | None = None,
) -> None:
    """Write a script that trains by several methods, with restarts; the job is checked first.

    :param path: The job file, as for hpcsgd compare.
    :param overrides: Keys of the file to change, such as --training.epochs 3.
    :param resume: Continue where the comparison stopped.
    """
    with errors_in_one_line():
        from hpcsgd.cluster.batch import check_comparison

        w = wanted or TopologyRequest()
        typed = (*overrides, *compared.overrides())
        checked = check_comparison(path, typed, compared.methods, w.allocation(), fresh=not resume)
        target = [] if compared.target is None else ["--target", str(compared.target)]
        words = [str(path), *typed, "--methods", compared.methods, *target]
        _write("compare", [*words, *(["--resume"] if resume else [])], checked, w, COMMAND="compare")


@job.command(usage=f"Usage: hpcsgd job ensemble {USAGE}")
def ensemble(
    path: Path,
    /,
    *overrides: JobKeys,
    independent: Flag = False,
    resume: Flag = False,
    wanted: TopologyRequest | None = None,
) -> None:
    """Write a script that trains with groups that may fail and return; the job is checked first.

    :param path: The job file, as for hpcsgd launch; it gives the number of groups.
    :param overrides: Keys of the file to change, such as --parallel.groups 8.
    :param independent: Make each group a job of its own, with these nodes, which starts when there is room.
    :param resume: Continue from the last checkpoint in the run folder.
    """
    with errors_in_one_line(path, overrides):
        from hpcsgd.cluster.batch import check_ensemble, check_replica_groups

        w = wanted or TopologyRequest()
        words = [str(path), *overrides, *(["--resume"] if resume else [])]
        check = check_replica_groups if independent else check_ensemble
        checked = check(path, overrides, w.allocation(), fresh=not resume)
        P = checked.config.parallel.groups
        if independent:
            _write("replica_group", words, checked, w, tasks=P, NUM_GROUPS=str(P))
        else:
            _write("ensemble", words, checked, w, NUM_GROUPS=str(P))


@job.command(usage=f"Usage: hpcsgd job probe {USAGE}")
def probe(path: Path, /, *overrides: JobKeys, wanted: TopologyRequest | None = None) -> None:
    """Write a script that finds out how many groups the training tolerates.

    :param path: The job file, as for hpcsgd probe.
    :param overrides: Keys of the file to change, such as --method.sync_every 4.
    """
    with errors_in_one_line(path, overrides):
        from hpcsgd.cluster.batch import check_probe

        _write("probe", [str(path), *overrides], check_probe(path, overrides), wanted or TopologyRequest())


@job.command(usage=f"Usage: hpcsgd job bench {USAGE}")
def bench(path: Path, /, *overrides: JobKeys, wanted: TopologyRequest | None = None) -> None:
    """Write a script that checks the allocation with hpcsgd doctor and trains for two minutes.

    :param path: The job file, as for hpcsgd train.
    :param overrides: Keys of the file to change, such as --parallel.groups 8.
    """
    with errors_in_one_line(path, overrides):
        from hpcsgd.cluster.batch import check_training

        w = wanted or TopologyRequest()
        _write("bench", [str(path), *overrides], check_training(path, overrides, w.allocation()), w)


@job.command(usage=f"Usage: hpcsgd job measure {USAGE}")
def measure(
    path: Path, /, *overrides: JobKeys, quick: Flag = False, wanted: TopologyRequest | None = None
) -> None:
    """Write a script that measures messages, and the job's model, on these nodes.

    :param path: The job file, as for hpcsgd measure.
    :param overrides: Keys of the file to change, such as --data.group_batch_size 64.
    :param quick: Measure for under a minute, with smaller messages and fewer repeats.
    """
    with errors_in_one_line(path, overrides):
        from hpcsgd.cluster.batch import check_measure

        words = [str(path), *overrides, *(["--quick"] if quick else [])]
        _write("measure", words, check_measure(path, overrides), wanted or TopologyRequest())


@job.command(usage="Usage: hpcsgd job pack [ENVIRONMENT] [--to FILE] [--site FILE]")
def pack(
    environment: Path = Path(sys.prefix), /, *, to: Path | None = None, site: Path | None = None
) -> None:
    """Write the Python environment into one file, which each node of a job unpacks on its own disk.

    :param environment: A virtual environment; default: the one that hpcsgd is in.
    :param to: The file; default: the pack of site.toml, or env.pack.
    :param site: Settings of all jobs here; default: ./site.toml or ~/.config/hpcsgd/site.toml.
    """
    with errors_in_one_line():
        from hpcsgd.cluster.batch import load_site
        from hpcsgd.cluster.environment import ask
        from hpcsgd.cluster.environment import pack as write

        known, _ = load_site(site)
        found = ask(environment)
        made = write(found, to or known.pack or Path("env.pack"), known.local)
        print(f"packed    {made.file}: {made.bytes / 1e6:,.0f} MB, {made.files:,} files of {found.prefix}")
        print(f"unpacks   to {known.local}/hpcsgd-UID/{made.name}, once a node")
        for path in found.left:
            print(f"left      {path}: on the path of Python, and read from where it is")
        if known.pack is None or to is not None:
            print(f'use       pack = "{made.file}" in site.toml, or {made.file} for python')


def _write(
    kind: str,
    words: list[str],
    checked: Checked,
    wanted: TopologyRequest,
    tasks: int | None = None,
    **own: str,
) -> None:
    from hpcsgd.cluster.batch import by_hand, estimate, load_site, prepare, submit

    site, source = load_site(wanted.site)
    here = {"partition": wanted.partition or site.partition, "account": wanted.account or site.account}
    order = prepare(
        kind, words, checked, wanted.allocation(), replace(site, **here), wanted.after, own, tasks
    )
    print(order)
    scheduler = order.scheduler
    print(f"site      {source or f'no site.toml: the defaults of {scheduler.title}, {scheduler.starting}'}")
    if site.pack is not None:
        print(f"python    {_reported(site.pack)}")
    print(f"{scheduler.name:8}  {estimate(order)}")
    if wanted.submit:
        print(f"submitted as job {submit(order)}")
    else:
        print(f"submit    {by_hand(order)}")


def _reported(pack: Path) -> str:
    """Return the path of `pack`, a file with a Python environment, as text.

    A hint is added if the environment has changed since `hpcsgd job pack` wrote it into this file.
    """
    from hpcsgd.cluster.environment import ask, changed_since

    if (Path(sys.prefix) / "pyvenv.cfg").exists() and changed_since(ask(Path(sys.prefix)), pack.expanduser()):
        return f"{pack}, older than this environment: hpcsgd job pack"
    return str(pack)
