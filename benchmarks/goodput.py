"""Measure goodput, useful samples over possible ones, against the mean time between failures.

    python benchmarks/goodput.py [--quick] [--runs 500] [--keep FILE] [--json FILE] [--plot FILE]

The measurements take half an hour on a machine that runs nothing else. The 500 random runs take about as
long; `--runs 0` skips them. See goodput/useful.py for the definition of useful samples, goodput/settings.py
for the measured settings and goodput/simulated.py for the simulated ones.

The measurements are scaled down in size and time. Groups have one rank, a node has two groups, and a sleep
stands for computing. Ranks, groups and nodes are killed at random moments. Start-up, restarts and checkpoints
are real, but checkpoints are small. The contestants are:

- groups, started by `hpcsgd launch`;
- one synchronous job, started by `mpiexec hpcsgd train` and restarted with --resume;
- torch's DistributedDataParallel, restarted by torch.distributed.run;
- torchft's LocalSGD and its lighthouse, if this Python has them.

An undisturbed run of each contestant gives the number of possible samples.

Each measured run is also simulated with the same number of failures, restart time and checkpoint interval. In
addition, 1,000 nodes are simulated. `--keep` takes the measurements and the random runs from an earlier
result and adds the missing ones.

For the random runs see goodput/random_runs.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from goodput import simulated
from goodput.contestants import CONTESTANTS, GROUPS, SYNC, NotHere
from goodput.measured import measured
from goodput.picture import draw
from goodput.random_runs import played
from goodput.settings import FULL, QUICK, Setting
from harness import Goal, Run, print_table

Row = dict[str, Any]
LOST, BELOW = 0.15, 0.30
"""Goal: groups lose at most LOST where the goodput of the one job is below BELOW."""
ERROR = 0.10
"""Goal: the mean error of the simulated goodput, over the simulated runs, is at most this."""
QUICK_RUNS = 2


def parts(rows: Sequence[Row], name: str) -> list[Row]:
    return [row for row in rows if row["part"] == name]


def setting_of(rows: Sequence[Row]) -> Setting | None:
    """Return the setting of the measured rows, or None if there are none."""
    return next((Setting(**row["setting"]) for row in parts(rows, "measured")), None)


def with_simulated(setting: Setting, rows: Sequence[Row]) -> list[Row]:
    return [{**row, "simulated": simulated.in_small(setting, row)} for row in rows]


def goals(rows: Sequence[Row]) -> list[Goal]:
    found = []
    for name in simulated.RESTARTS:
        curve = [row for row in parts(rows, "at scale") if row["restart"] == name]
        if low := [row for row in curve if row[SYNC] < BELOW]:
            lost = max(1 - row[GROUPS] for row in low[-1:])
            every = f"{low[-1]['mtbf_s'] / 60:.3g} min"
            found.append(
                Goal(
                    f"lost by groups, one job below {BELOW:.0%}: {name}, a failure every {every}", lost, LOST
                )
            )
    errors = [
        abs(r["simulated"] - r["goodput"]) for r in parts(rows, "measured") if r["simulated"] is not None
    ]
    if errors:
        found.append(
            Goal("simulated against measured goodput, in the mean", sum(errors) / len(errors), ERROR)
        )
    if runs := parts(rows, "random run"):
        found.append(Goal("random runs of which anything was wrong", sum(bool(r["wrong"]) for r in runs), 0))
    return found


def tell(rows: Sequence[Row]) -> None:
    head = ["contestant", "failure every s", "failures", "restart s", "goodput", "simulated"]
    print_table(
        (
            [r["who"], f"{r['mtbf_s']:g}", r["failures"], _figure(r["restart_s"], ".1f"),
             f"{r['goodput']:.1%}", _figure(r["simulated"], ".1%")]
            for r in parts(rows, "measured")
        ), head,
    )  # fmt: skip
    head = ["a failure every", *(f"{who}, {name}" for name in simulated.RESTARTS for who in (GROUPS, SYNC))]
    curves = parts(rows, "at scale")
    times = sorted({row["mtbf_s"] for row in curves})
    cells = (
        [
            f"{t / 60:.4g} min",
            *(f"{row[who]:.1%}" for row in curves if row["mtbf_s"] == t for who in (GROUPS, SYNC)),
        ]
        for t in times
    )
    print_table(cells, head)
    head = ["a node fails every", "nodes", GROUPS, SYNC]
    print_table(
        ([r["node_mtbf"], r["nodes"], f"{r[GROUPS]:.1%}", f"{r[SYNC]:.1%}"] for r in parts(rows, "by nodes")),
        head,
    )
    if runs := parts(rows, "random run"):
        kills, rounds = (sum(row[name] for row in runs) for name in ("kills", "rounds"))
        print(f"{len(runs)} random runs, {kills} kills, {rounds} rounds")


def _figure(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--who", nargs="+", default=list(CONTESTANTS), choices=list(CONTESTANTS))
    parser.add_argument("--groups", type=int, help=f"groups of the measured runs; {FULL.P} by default")
    parser.add_argument("--window", type=float, help=f"seconds of each run; {FULL.window:g} by default")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runs", type=int, help="number of random runs; 500 by default")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="an earlier result to continue")
    parser.add_argument("--quick", action="store_true", help="run for at most a minute")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    given = parser.parse_args()
    asked = {"P": given.groups, "window": given.window}
    run, say = Run(), partial(print, flush=True)
    rows = [row for row in run.kept(given.keep) if row["part"] in ("measured", "random run")]
    setting = setting_of(rows) or replace(
        QUICK if given.quick else FULL, **{name: value for name, value in asked.items() if value is not None}
    )

    def keep(more: Iterable[Row]) -> None:
        """Add rows and write the file after each one, so that a later failure does not lose them."""
        for row in more:
            rows.append(row)
            if given.json:
                run.write(given.json, rows)

    absent = []
    for who in [GROUPS] if given.quick else given.who:
        if all(row["who"] != who for row in parts(rows, "measured")):
            try:
                keep(measured(setting, who, given.seed, say))
            except NotHere as reason:
                absent.append(str(reason))
                say(absent[-1])
    count = given.runs if given.runs is not None else QUICK_RUNS if given.quick else 500
    there = {row["run"] for row in parts(rows, "random run")}
    keep(played(number, given.seed, say) for number in range(1, count + 1) if number not in there)
    rows = with_simulated(setting, parts(rows, "measured")) + parts(rows, "random run")
    if not given.quick:
        rows += simulated.at_scale() + simulated.by_nodes()
    tell(rows)
    if given.plot:
        draw(rows, given.plot)
    run.conclude(rows, goals(rows), given.json, {"absent": absent} if absent else None)


if __name__ == "__main__":
    main()
