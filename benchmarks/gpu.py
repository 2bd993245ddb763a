"""Training on the GPUs of this machine: does it work, and what does it cost?

    python benchmarks/gpu.py [--only SECTION …] [--quick] [--out FOLDER] [--json FILE]
    python benchmarks/gpu.py --rehearse

This is a single command for users with a GPU. Each section is a process of its own with a time limit, so a
section that crashes or hangs loses only its own results. Results and logs are written as they are produced.
All sections together take at most --minutes. Time that a section does not use is available to the next ones.
Without a GPU nothing is measured. --rehearse runs the same code with tiny sizes on the test device of
tests/far, or on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from gpu.section import test_device
from harness import Goal, Run, print_table
from harness.launching import BENCHMARKS, python_path
from harness.limited import run_limited
from hpcsgd.cluster.doctor.accelerators import driver_version
from hpcsgd.comm.streams import DRIVERS, accelerator, properties, why_none


@dataclass(frozen=True)
class Section:
    """A module of `gpu/`."""

    name: str
    share: float
    """The section's share of the total time."""
    about: str


SECTIONS = {
    section.name: section
    for section in (
        Section("build", 0.2, "the CUDA kernels: build, tests, compute-sanitizer"),
        Section("one_rank", 0.22, "steps, waits and memory of one rank, compared with plain torch"),
        Section("four_ranks", 0.24, "2 x 2 ranks on one GPU, by MPI, against the CPU"),
        Section("overlap", 0.08, "copies and messages while kernels run"),
        Section("kernels", 0.1, "selection and quantizers, compared with torch.topk and a copy"),
        Section("nccl", 0.06, "groups of NCCL: made, used, aborted, refused"),
        Section("cores", 0.1, "steps and messages of ranks that have a core each"),
    )
}
MINUTES, REHEARSAL = 8.0, 40.0
LEAST = 5.0
"""Minimum number of seconds of a section, however long the sections before it took."""
NOTHING = "no GPU here: nothing was measured"
HEAD = ["section", "seconds", "rows", "goals met", "ended"]
TAIL = 1500
"""Number of characters shown of the log of a section that failed."""


@dataclass(frozen=True)
class Ended:
    """The outcome of a section."""

    section: Section
    failure: str
    seconds: float
    rows: list[dict[str, Any]]
    goals: list[Goal]

    def cells(self) -> list[object]:
        met = f"{sum(goal.met for goal in self.goals)} of {len(self.goals)}"
        return [self.section.name, f"{self.seconds:.0f}", len(self.rows), met, self.failure or "well"]


def kind_of(given: argparse.Namespace) -> str | None:
    """Return the kind of device to run on, or `None` if there is none to be measured."""
    there = accelerator()
    if given.device is not None:
        return given.device
    if given.rehearse:
        return "far" if _has_test_device() else "cpu"
    return None if there is None else there.type


def _has_test_device() -> bool:
    if why := test_device().missing():
        print(f"rehearsing on the CPU: {why}")
    return not why


def setting_of(kind: str) -> dict[str, Any]:
    """Return which GPU was used, and the versions of its software."""
    there = accelerator()
    if there is None or there.type != kind:
        return {"gpu": None, "device": kind}
    told: Any = properties(torch.device(kind, 0))
    named = {"gpu": told.name, "gpu_memory_gib": round(told.total_memory / 2**30, 1)}
    versions = {"cuda": torch.version.cuda, "hip": torch.version.hip, "driver": driver_version(DRIVERS)}
    return {**named, "gpus": torch.accelerator.device_count(), "device": kind, **versions}


def run_section(section: Section, kind: str, given: argparse.Namespace, seconds: float) -> Ended:
    """Run a section and append its log to log.txt."""
    log = given.out / "log.txt"
    with log.open("a") as file:
        file.write(f"\n=== {section.name}: {section.about}\n")
    before = log.stat().st_size
    with tempfile.TemporaryDirectory() as scratch:
        found = given.out / "unfinished.json"
        script = BENCHMARKS / "gpu" / "section.py"
        words = ["--file", found, "--folder", given.out, "--kind", kind, "--seconds", f"{seconds:.0f}"]
        flags = [f"--{flag}" for flag in ("quick", "rehearse") if getattr(given, flag)]
        environment = {
            **os.environ,
            "PYTHONPATH": python_path(),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": scratch,
        }
        command = [sys.executable, "-P", str(script), section.name, *map(str, words), *flags]
        failure, took = run_limited(command, log, timeout=seconds, env=environment, cwd=BENCHMARKS.parent)
        told = json.loads(found.read_text()) if found.exists() else {"rows": [], "goals": []}
        found.unlink(missing_ok=True)
    print(f"\n=== {section.name}: {section.about} ({took:.0f} s)")
    said = log.read_bytes()[before:].decode(errors="replace").strip()
    print(said[-TAIL:] if failure else _short(said), flush=True)
    goals = [Goal(goal["name"], goal["value"], goal["goal"]) for goal in told["goals"]]
    rows = [{"section": section.name, **row} for row in told["rows"]]
    return Ended(section, failure, took, rows, goals)


def _short(said: str) -> str:
    """Return only the lines about goals, because often only the end of the output is kept."""
    return "\n".join(line for line in said.splitlines() if line.startswith(("met ", "MISSED ", "note: ")))


def run_all(run: Run, results: Path, kind: str, given: argparse.Namespace) -> list[Ended]:
    """Run the sections in turn.

    A section must end when it and those before it have used up their shares of time.
    """
    chosen = [section for name, section in SECTIONS.items() if name in (given.only or SECTIONS)]
    ended: list[Ended] = []
    started, share = monotonic(), 0.0
    for section in chosen:
        share += section.share
        left = started + share * 60 * given.minutes - monotonic()
        ended.append(run_section(section, kind, given, max(left, LEAST)))
        run.write(results, [row for each in ended for row in each.rows])
    return ended


def main() -> None:
    parser = argparse.ArgumentParser(description="Training on the GPUs of this machine.")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), metavar="SECTION", help="run these only")
    parser.add_argument("--quick", action="store_true", help="check that it runs: fewer sizes and rounds")
    parser.add_argument(
        "--rehearse", action="store_true", help="run everything without a GPU, with tiny sizes"
    )
    parser.add_argument("--device", choices=("cpu", "cuda", "far", "xpu"), help="default: the one present")
    told = f"of all sections together; default {MINUTES:g}, and {REHEARSAL:g} to rehearse"
    parser.add_argument("--minutes", type=float, help=told)
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), metavar="FOLDER")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the results; default FOLDER/results.json")
    given = parser.parse_args()
    given.out = given.out.absolute()
    run, kind = Run(), kind_of(given)
    if kind is None:
        why = why_none("cuda")
        print(f"{NOTHING} ({why})" if why else NOTHING)
        return run.conclude([], [], given.json, {"gpu": None})
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "log.txt").unlink(missing_ok=True)
    given.minutes = given.minutes or (REHEARSAL if given.rehearse else MINUTES)
    results = given.json or given.out / "results.json"
    ended = run_all(run, results, kind, given)
    rows, goals = ([x for each in ended for x in getattr(each, name)] for name in ("rows", "goals"))
    print()
    run.conclude(rows, goals, results, {**setting_of(kind), "rehearsed": given.rehearse})
    print()
    print_table([each.cells() for each in ended], HEAD)
    if failed := [each.section.name for each in ended if each.failure]:
        raise SystemExit(f"not to their end: {', '.join(failed)}; see {given.out / 'log.txt'}")


if __name__ == "__main__":
    main()
