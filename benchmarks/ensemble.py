"""Measure EnsembleSync on this machine: its fault tolerance, the cost of a round, and its speedup.

    python benchmarks/ensemble.py --faults [--runs 200] [--quick] [--json FILE]
    python benchmarks/ensemble.py --round [--quick] [--json FILE]
    python benchmarks/ensemble.py --reallocation --data DATA [--quick] [--json FILE] [--plot FILE]
    python benchmarks/ensemble.py --speed --data DATA [--quick] [--json FILE] [--plot FILE]
    python benchmarks/ensemble.py --shares --data DATA --epochs 12 --seeds 3 [--quick] [--json FILE]
    python benchmarks/ensemble.py --slow --data DATA --seeds 3 [--quick] [--json FILE]

`--faults`: random runs of four groups on virtual hosts. Groups are killed, frozen or disconnected, and the
results are checked bit for bit. It needs root and iproute2; see ensemble/faults.py.
`--round`: see ensemble/rounds.py.
`--reallocation`: see ensemble/reallocation.py; it needs digits.h5 in DATA.
`--speed`: see ensemble/speed.py; it needs root, iproute2 and cifar10.h5 in DATA.
`--shares`: see ensemble/shares.py; it needs cifar10.h5 in DATA.
`--slow`: see ensemble/slow.py; it needs digits.h5 in DATA.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median

from ensemble.faults import HEARTBEAT_TIMEOUT, KINDS, soak
from ensemble.reallocation import reallocation
from ensemble.rounds import rounds
from ensemble.shares import shares
from ensemble.slow import slow
from ensemble.speed import speed
from harness import Goal, Run, print_table
from harness.hosts import shaped_hosts
from papers.beside.ensemblesync import unit_panels
from papers.panels import draw


def faults(runs: int, seed: int, keep: Path | None) -> tuple[list[dict[str, object]], list[Goal]]:
    with tempfile.TemporaryDirectory() as temporary, shaped_hosts(4, "1gbit") as hosts:
        outcomes = soak(runs, seed, hosts, keep or Path(temporary), lambda line: print(line, flush=True))
    rows: list[dict[str, object]] = []
    goals = [
        Goal("runs of which anything was wrong", sum(bool(outcome.wrong) for outcome in outcomes), 0),
    ]
    for kind in KINDS:
        seconds = [s for outcome in outcomes for k, s in outcome.standstill if k == kind]
        if not seconds:
            continue
        rows.append(
            {"fault": kind, "times": len(seconds), "median_s": median(seconds), "max_s": max(seconds)}
        )
        limit = 2.0 if kind in ("kill", "all but one") else HEARTBEAT_TIMEOUT + 2
        goals.append(Goal(f"seconds from {kind} to progress, at most", max(seconds), limit))
    rounds = sum(outcome.rounds for outcome in outcomes)
    print(f"{len(outcomes)} runs, {rounds} rounds, heartbeat timeout {HEARTBEAT_TIMEOUT:g} s")
    table = [(row["fault"], row["times"], f"{row['median_s']:.2f}", f"{row['max_s']:.2f}") for row in rows]
    print_table(table, ["fault", "times", "median s", "max s"])
    return [{"runs": len(outcomes), "rounds": rounds}, *rows], goals


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    part = parser.add_mutually_exclusive_group(required=True)
    part.add_argument("--faults", action="store_true")
    part.add_argument("--round", action="store_true")
    part.add_argument("--reallocation", action="store_true")
    part.add_argument("--speed", action="store_true")
    part.add_argument("--shares", action="store_true")
    part.add_argument("--slow", action="store_true")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="the folder in which the files of the runs are kept")
    parser.add_argument("--data", type=Path, default=Path("data"), help="the folder with the dataset files")
    parser.add_argument("--rounds", type=int, default=8, help="number of blocks of steps of each contestant")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--plot", type=Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="run for at most a minute")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    run, setting = Run(), {}
    if given.speed:
        more = {"rounds": given.rounds, "epochs": given.epochs, "seeds": given.seeds, "plot": given.plot}
        rows, goals, setting = speed(given.data, quick=given.quick, **more)
    elif given.shares:
        rows, goals = shares(given.data, quick=given.quick, epochs=given.epochs, seeds=given.seeds)
    elif given.slow:
        rows, goals = slow(given.data, quick=given.quick, seeds=given.seeds)
    elif given.reallocation:
        rows, goals = reallocation(given.data, quick=given.quick)
        if given.plot is not None:
            draw(given.plot, unit_panels(rows))
    elif given.round:
        rows, goals = rounds(given.quick)
    else:
        rows, goals = faults(8 if given.quick else given.runs, given.seed, given.keep)
    run.conclude(rows, goals, given.json, setting)


if __name__ == "__main__":
    main()
