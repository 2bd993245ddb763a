"""``hpcsgd plan``: make a table, a picture and a recommendation from a job file and a machine file."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from hpcsgd.config.reader import as_table
from hpcsgd.config.schema import load
from hpcsgd.core.waits import least_groups
from hpcsgd.cost import machine as machines
from hpcsgd.cost.machine import Machine
from hpcsgd.errors import UserError, count_text, in_file
from hpcsgd.files.atomic import replacing
from hpcsgd.files.reading import read_json
from hpcsgd.performance.planning import report
from hpcsgd.performance.planning.candidates import Option, options, ranks_from, shapes
from hpcsgd.performance.planning.choice import Limits, ranked
from hpcsgd.performance.planning.estimate import Estimate, estimate, one_node
from hpcsgd.performance.planning.job_file import write_choice
from hpcsgd.performance.planning.picture import draw
from hpcsgd.performance.planning.scenario import scenario_of
from hpcsgd.train.training_profile import TrainingProfile, profile_of, require_same_model

log = logging.getLogger(__name__)

SHOWN = 20
"""The number of estimates in the printed table; ``plan.json`` has all of them."""


def run(
    path: Path,
    overrides: Sequence[str],
    machine_file: Path,
    *,
    probe: Path | None,
    ranks: str | None,
    methods: str | None,
    sync_every: str | None,
    sync_rate: float | None,
    samples: int | None,
    limits: Limits,
    runs: Sequence[Path],
    scenario: Path | None,
    write: bool,
) -> None:
    """Print the plan, and write ``plan.json`` and ``plan.png`` into a folder next to the run folder.

    Raises a one-line `UserError` if there is nothing to recommend.
    """
    if sync_rate is not None and not 0 <= sync_rate <= 1:
        raise UserError(
            f"--sync-rate {sync_rate:g}: expected the share of steps with a synchronization, 0 to 1"
        )
    config, machine = load(path, overrides), machines.load(machine_file)
    with in_file(path):
        subject = profile_of(config, samples)
    require_same_model(subject, machine, machine_file)
    limit = config.parallel.groups if probe is None else groups_of(probe)
    wanted = _ranks(ranks, machine)
    asked = None if methods is None else [name.strip() for name in methods.split(",")]
    own = as_table(config.method)
    found, left_out = estimates(
        subject, machine, options(own, asked, _numbers(sync_every)), wanted, limit, sync_rate=sync_rate
    )
    ordered, why = ranked(found, limits, config.method.name)
    done = [measured_run(folder, subject) for folder in runs]
    _tell(ordered, why, left_out)
    if limit is None:
        log.warning(
            "neither --probe nor [parallel] groups is given: the plan does not limit the number of groups"
        )
    folder = config.run.output_dir.with_name(f"{config.run.output_dir.name}-plan")
    _write(folder, ordered, why, done, {"job": str(path), "machine": str(machine_file), "measured": done})
    if scenario is not None:
        with replacing(scenario) as part:
            part.write_text(scenario_of(ordered[0]), encoding="utf-8")
        print(f"written {scenario}: hpcsgd simulate {scenario}")
    if write:
        write_choice(path, ordered[0].P, ordered[0].option.table)
        print(f"written into {path}: {count_text(ordered[0].P, 'group')}, {ordered[0].option}")


def estimates(
    subject: TrainingProfile,
    machine: Machine,
    tried: Sequence[Option],
    ranks: Sequence[int],
    limit: int | None,
    *,
    sync_rate: float | None = None,
) -> tuple[list[Estimate], dict[str, str]]:
    """Return the estimates of every option for every P × K, and the reasons why options were left out.

    Raises `UserError` if there is no estimate.
    """
    per_rank = one_node(subject, machine, limit)
    found: list[Estimate] = []
    left_out: dict[str, str] = {}
    for option, N in product(tried, ranks):
        for P, K in shapes(N, subject.B, limit):
            try:
                made = estimate(subject, machine, option, P, K, sync_rate=sync_rate, alone=per_rank)
            except UserError as error:
                left_out.setdefault(str(option), str(error))
                continue
            if (quorum := least_groups(made.plan.waits)) > P:
                few = f"{option} with fewer than {count_text(quorum, 'group')}"
                left_out[few] = f"quorum = {quorum}: expected at most the number of groups"
            else:
                found.append(made)
    if not found:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        few = (
            f"no P groups of K among {', '.join(map(str, ranks))} ranks whose batches of {subject.B} can be "
        )
        most = count_text(limit, "group") if limit else "any number of groups"
        raise UserError(reasons or few + f"shared by K, with {most} at most")
    priced = {str(e.option) for e in found}
    return found, {name: reason for name, reason in left_out.items() if name not in priced}


def groups_of(probe: Path) -> int:
    """Return the number of groups that a probe found, from its ``probe.json``."""
    try:
        return int(read_json(probe)["P"])
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise UserError(f"{probe}: not the probe.json of a probe: {error}") from error


def measured_run(folder: Path, subject: TrainingProfile) -> dict[str, Any]:
    """Return ranks and seconds per epoch of the finished run in `folder`, or raise `UserError`."""
    try:
        summary = read_json(folder / "summary.json")
        last = read_json(folder / "versions.json")[-1]
        seconds = subject.samples / summary["samples_per_s"]
        return {"run": str(folder), "ranks": last["P"] * last["K"], "epoch_seconds": seconds}
    except (ValueError, KeyError, TypeError, IndexError, ArithmeticError) as error:
        raise UserError(f"--runs {folder}: not the folder of a run that was trained: {error}") from error


def _ranks(text: str | None, machine: Machine) -> list[int]:
    """Return the numbers of ranks in `text` (default: up to the whole machine) that fill whole nodes.

    Numbers that are less than one node's ranks are allowed, too. Raises `UserError` if no number fits.
    """
    R = machine.ranks_per_host
    given = ranks_from(text or f"{R}..{R * machine.hosts}")
    fitting = [N for N in given if N % R == 0 or N < R]
    if not fitting:
        raise UserError(
            f"--ranks {text}: the machine has {count_text(R, 'rank')} a node, and none of these fills nodes"
        )
    return fitting


def _numbers(text: str | None) -> list[int]:
    try:
        numbers = [] if text is None else [int(word) for word in text.split(",")]
    except ValueError:
        raise UserError(f"--sync-every {text}: expected steps, as 4,8,16") from None
    if any(number < 1 for number in numbers):
        raise UserError(f"--sync-every {text}: at least 1 step")
    return numbers


def _tell(ordered: Sequence[Estimate], why: str, left_out: Mapping[str, str]) -> None:
    print(report.HEAD)
    for e in ordered[:SHOWN]:
        print(report.row(e))
    if len(ordered) > SHOWN:
        print(f"… and {len(ordered) - SHOWN} more in plan.json")
    for name, reason in left_out.items():
        print(f"left out: {name}: {reason}")
    print(report.in_words(ordered[0], why))


def _write(
    folder: Path,
    ordered: Sequence[Estimate],
    why: str,
    runs: Sequence[Mapping[str, Any]],
    about: Mapping[str, Any],
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "plan.json") as part:
        part.write_text(report.to_json(ordered, why, about))
    with replacing(folder / "plan.png") as part:
        draw(ordered, runs, part)
    print(f"written {folder}/plan.json and plan.png")
