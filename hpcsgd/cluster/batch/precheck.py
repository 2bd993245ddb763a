"""Check a job before it is submitted, so that a job with mistakes does not wait for nodes."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcsgd.cluster.batch.allocation import Allocation
from hpcsgd.cluster.launch.run import group_sizes
from hpcsgd.cluster.launch.starter import sizes
from hpcsgd.comm import Communicator, threads
from hpcsgd.config.schema import Config, load
from hpcsgd.config.variants import configs
from hpcsgd.core.replica_groups import NO_REPLICA_GROUPS, Absent, ReplicaGroups
from hpcsgd.core.topology import form, groups_across_nodes, shape
from hpcsgd.elastic.journal import FOLDER as COORDINATORS
from hpcsgd.errors import count_text, in_file, in_section, located
from hpcsgd.performance.comparing import folder_of
from hpcsgd.performance.probing.job_file import plan_of
from hpcsgd.report.run_folder import require_unused
from hpcsgd.train.loading import make_injection, make_partition, require_divisible
from hpcsgd.train.predicted import predicted
from hpcsgd.train.probe_answer import take_answer
from hpcsgd.train.training_setup import assemble


@dataclass(frozen=True)
class Checked:
    """The configuration of a job file that has passed the checks, and a text about its groups and nodes."""

    config: Config
    placement: str


def check_training(
    path: Path,
    overrides: Sequence[str],
    allocation: Allocation,
    *,
    fresh: bool = False,
    probe: Path | None = None,
    awaited: bool = False,
) -> Checked:
    """Check a job of `hpcsgd train`: build everything that its file names, on one rank, without training.

    With `fresh` the run folder must be unused. `probe` is a probe.json with the number of groups; if
    `awaited`, another job may write that file later. Raises `UserError` if the job would fail.
    """
    config = load(path, overrides)
    if fresh:
        require_unused(config.run.output_dir)
    _require_buildable(config, path)
    if probe is not None:
        if awaited and not probe.exists():
            return Checked(config, f"as many groups as {probe} will tell")
        config, _ = take_answer(config, probe, allocation.ranks)
    return Checked(config, _placed(config, path, allocation))


def check_comparison(
    path: Path, overrides: Sequence[str], methods: str, allocation: Allocation, *, fresh: bool = False
) -> Checked:
    """Check each variant like `check_training`, and return the configuration of the first variant."""
    chosen = configs(path, overrides, methods)
    first = next(iter(chosen.values()))
    if fresh:
        require_unused(folder_of(first.run))
    placements: list[str] = []
    for label, config in chosen.items():
        with located(f"variant {label!r}"):
            _require_buildable(config, path)
            placements.append(_placed(config, path, allocation))
    return Checked(
        first, f"{count_text(len(chosen), 'variant')} in turn, {'; '.join(dict.fromkeys(placements))}"
    )


def check_ensemble(
    path: Path, overrides: Sequence[str], allocation: Allocation, *, fresh: bool = False
) -> Checked:
    """Check a job of elastic groups like `check_training`; the result's configuration has their number."""
    config = load(path, overrides)
    if fresh:
        require_unused(config.run.output_dir)
    K = group_sizes(path, config, allocation.ranks)
    P = len(K)
    _assemble_alone(config, path, Absent(count=P))
    config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, groups=P))
    return Checked(config, f"{_placement(allocation, P, K[0])}, which the others survive")


def check_replica_groups(
    path: Path, overrides: Sequence[str], allocation: Allocation, *, fresh: bool = False
) -> Checked:
    """Check separately started groups like `check_ensemble`. Each of them gets `allocation`.

    With `fresh` the run folder may also be that of a run that other groups have started separately.
    """
    config = load(path, overrides)
    if fresh and not (config.run.output_dir / COORDINATORS).exists():
        require_unused(config.run.output_dir)
    (K,) = sizes(1, config.parallel.group_size, allocation.ranks)
    P = len(group_sizes(path, config, 0, None, K))
    _assemble_alone(config, path, Absent(count=P))
    config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, groups=P))
    return Checked(config, f"a group, one of {P} that start when there are nodes for them")


def check_probe(path: Path, overrides: Sequence[str]) -> Checked:
    """Check a probe: build everything that the job file names. Raises `UserError` if it cannot run."""
    config = load(path, overrides)
    plan_of(config, path, None, 1)
    _assemble_alone(config, path)
    return Checked(config, "2, 4, 8, … virtual groups in turn")


def check_measure(path: Path, overrides: Sequence[str]) -> Checked:
    """Check a measurement: build what the job file names. Raises `UserError` if it cannot be measured."""
    config = load(path, overrides)
    _assemble_alone(_undivided(config), path)
    return Checked(config, "groups of every size in turn")


def _require_buildable(config: Config, path: Path) -> None:
    with in_file(path):
        make_partition(config.data)
        make_injection(config.data)
    _assemble_alone(_undivided(config), path)


def _placed(config: Config, path: Path, allocation: Allocation) -> str:
    with in_file(path), in_section("parallel"):
        P, K = shape(allocation.ranks, config.parallel.groups, config.parallel.group_size)
    with in_file(path):
        require_divisible(config, P, K)
    if (machine := config.training.machine) is not None:
        with in_file(path), in_section("training", "machine"):
            predicted(config, P, K, machine, allocation.ranks_per_node)
    return _placement(allocation, P, K)


def _undivided(config: Config) -> Config:
    """Return `config` without partition and injection, so that one rank can build it alone."""
    return dataclasses.replace(
        config, data=dataclasses.replace(config.data, partition=None, overlap_share=None, injection=None)
    )


def _assemble_alone(config: Config, path: Path, peers: ReplicaGroups = NO_REPLICA_GROUPS) -> None:
    def one_rank(world: Communicator) -> None:
        assemble(alone, dataclasses.replace(form(world), replica_groups=peers), str(path), values=False)

    alone = dataclasses.replace(config, data=dataclasses.replace(config.data, num_workers=0))
    with contextlib.redirect_stdout(io.StringIO()):  # hides what a model prints while it is built
        threads.run(1, one_rank)


def _placement(allocation: Allocation, P: int, K: int) -> str:
    nodes = [rank // allocation.ranks_per_node for rank in range(allocation.ranks)]
    spread = groups_across_nodes(nodes, K)
    where = "each on one node"
    if spread:
        where = (
            f"{len(spread)} of them on more than one node: their gradients cross the network at every step; "
            "let group_size divide --ranks-per-node"
        )
    return f"{count_text(P, 'group')} of {K}, {where}"
