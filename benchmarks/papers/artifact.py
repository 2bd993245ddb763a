"""A table or figure of a paper: what we measure for it, what the paper has, and the command line.

The modules of all five papers use this one. An artifact is a table or a figure. Existing benchmarks measure
it at a small scale; `result` names the file in benchmarks/results/ with the last measurement.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import Goal, Run, print_table
from harness.launching import BENCHMARKS
from harness.record import print_goals
from papers.at_scale import Job, write
from papers.panels import Panel, draw

Row = dict[str, Any]
RESULTS = BENCHMARKS / "results"
NOT_YET = "not measured yet"
DRAWN = "a drawing or words, nothing measured"


@dataclass(frozen=True)
class Place:
    """The folder of the datasets, and whether a quick run of about a minute is wanted."""

    data: Path
    quick: bool


@dataclass(frozen=True)
class Beside:
    """Our result next to the paper's.

    `head` and `cells` make up a table. `ours` and `papers` state the two results in a few words.
    """

    head: Sequence[str]
    cells: Sequence[Sequence[object]]
    ours: str
    papers: str
    goals: Sequence[Goal]
    """Each goal is reached if one effect that the paper reports is also in our result."""

    @property
    def direction(self) -> str:
        """The verdict: "yes" if all goals are reached, "in part" if some are, else "no"."""
        met = [goal.met for goal in self.goals]
        return "yes" if all(met) else "in part" if any(met) else "no"


@dataclass(frozen=True)
class Small:
    """The part of an artifact that two cores can measure."""

    measure: Callable[[Place], list[Row]]
    beside: Callable[[list[Row]], Beside]
    result: str
    """The file in benchmarks/results/. Rows of another benchmark are in that benchmark's file."""
    panels: Callable[[list[Row]], Sequence[Panel]] | None = None

    @property
    def file(self) -> Path:
        return RESULTS / self.result

    def kept(self) -> Beside | None:
        """Return the comparison with the last measurement, or None if there is none."""
        return self.beside(json.loads(self.file.read_text())["rows"]) if self.file.exists() else None


@dataclass(frozen=True)
class Artifact:
    """One table or figure of a paper."""

    what: str
    small: Small | None = None
    """None for a drawing, an algorithm or a list in words."""
    jobs: Callable[[], Sequence[Job]] | None = None
    """A function that returns the jobs of the original setting; None if there are no jobs."""
    why: str = ""
    """How our setting differs from the paper's."""


Artifacts = Mapping[str, Artifact]
"""The artifacts of a paper by name, such as "Table 1"."""


def page(artifacts: Artifacts) -> list[str]:
    """Return the lines of benchmarks/papers/README.md for the artifacts that we measure."""
    return [_line(name, artifact, artifact.small) for name, artifact in artifacts.items() if artifact.small]


def _line(name: str, artifact: Artifact, small: Small) -> str:
    kept = small.kept()
    ours, papers, direction = (kept.ours, kept.papers, kept.direction) if kept else ("", "", NOT_YET)
    return f"| {name} | {artifact.what} | {ours} | {papers} | {direction} | {artifact.why} |"


def outcome(artifacts: Artifacts) -> str:
    """Return what docs/papers.md says about a paper.

    The text says how many of the measured artifacts agree with the paper, and names those that do not.
    """
    found = {
        name: kept.direction for name, each in artifacts.items() if each.small and (kept := each.small.kept())
    }
    listed = {way: [name.lower() for name, its in found.items() if its == way] for way in ("in part", "no")}
    parts = [f"{list(found.values()).count('yes')} of {len(found)} are as in the paper"]
    parts += [f"{', '.join(listed['in part'])} in part"] if listed["in part"] else []
    parts += [f"{', '.join(listed['no'])} not"] if listed["no"] else []
    return "; ".join(parts) + "."


def words(name: str) -> tuple[str, str]:
    """Return the option and the value that select an artifact on the command line."""
    kind, number = name.split(" ")
    return f"--{kind.lower()}", number


def main(title: str, artifacts: Artifacts, arguments: Sequence[str] | None = None) -> None:
    """Run the command line of one paper."""
    given = _parser(title, artifacts).parse_args(arguments)
    if given.list:
        print_table(_listed(artifacts), ["", "what", "two cores", "original"])
        return
    if given.page:
        print("\n".join(page(artifacts)))
        return
    name = f"Table {given.table}" if given.table else f"Figure {given.figure}"
    if given.scale == "paper":
        _write_jobs(name, artifacts[name], given.data, given.out)
    elif (small := artifacts[name].small) is None:
        print(f"{name}: {artifacts[name].what}: {DRAWN}")
    else:
        _measure(name, small, given)


def _parser(title: str, artifacts: Artifacts) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=f"The tables and figures of {title}, ours beside the paper's."
    )
    which = parser.add_mutually_exclusive_group(required=True)
    for kind in ("Table", "Figure"):
        numbers = [name.split(" ")[1] for name in artifacts if name.startswith(kind)]
        which.add_argument(f"--{kind.lower()}", choices=numbers)
    which.add_argument("--list", action="store_true", help="all of them, and what there is of each")
    which.add_argument("--page", action="store_true", help="the lines of benchmarks/papers/README.md")
    scales = "small: measured here; paper: job files and scripts for Slurm of the original setting"
    parser.add_argument("--scale", choices=["small", "paper"], default="small", help=scales)
    parser.add_argument("--data", type=Path, default=Path(), help="the folder with the stores")
    parser.add_argument("--out", type=Path, default=Path("papers"), help="where --scale paper writes to")
    parser.add_argument("--kept", action="store_true", help="as measured last, from benchmarks/results")
    parser.add_argument("--quick", action="store_true", help="a minute: that it runs, not what it measures")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    return parser


def _listed(artifacts: Artifacts) -> list[list[str]]:
    found = []
    for name, each in artifacts.items():
        small = DRAWN if each.small is None else each.small.result if each.small.kept() else NOT_YET
        jobs = "" if each.jobs is None else f"{len(each.jobs())} jobs"
        found.append([name, each.what, small, jobs])
    return found


def _measure(name: str, small: Small, given: argparse.Namespace) -> None:
    if given.kept:
        _show_kept(name, small, given.plot)
        return
    run = Run()
    rows = small.measure(Place(given.data.resolve(), given.quick))
    beside = _shown(name, small, rows, given.plot)
    run.conclude(rows, beside.goals, given.json)


def _show_kept(name: str, small: Small, plot: Path | None) -> None:
    if not small.file.exists():
        raise SystemExit(f"{name}: {NOT_YET}: there is no {small.file.relative_to(BENCHMARKS.parent)}")
    result = json.loads(small.file.read_text())
    beside = _shown(name, small, result["rows"], plot)
    print(f"measured {result.get('date', 'on an unknown date')}, by {' '.join(result['command'])}")
    print_goals(beside.goals)


def _shown(name: str, small: Small, rows: list[Row], plot: Path | None) -> Beside:
    beside = small.beside(rows)
    print(f"\n{name}, ours beside the paper's")
    print_table(beside.cells, beside.head)
    print(f"ours   {beside.ours}\npaper  {beside.papers}\nas in the paper: {beside.direction}")
    if plot and small.panels:
        draw(plot, small.panels(rows))
    return beside


def _write_jobs(name: str, artifact: Artifact, data: Path, out: Path) -> None:
    if artifact.jobs is None:
        raise SystemExit(f"{name}: {artifact.what}: no training, so there is no job of its original setting")
    for order in write(artifact.jobs(), data, out):
        print(f"{order}\n")
