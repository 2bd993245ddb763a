"""Strong scaling, as in figures 5 and 9 of the hierarchical local SGD paper; needs root and iproute2.

    python benchmarks/strong_scaling.py [--ranks N …] [--quick] [--json FILE] [--plot FILE]

The same global batch is divided among 1, 2, 4, 8 and 16 ranks, two per host, so on up to 8 hosts with links
of 30 Mbit/s. Computing is emulated: ranks sleep for their part of the batch, layer by layer. Everything else
is real. Synchronous SGD is `bsp`, with one group per host, and DistributedDataParallel over gloo. It is
compared with local SGD by allreduces and with hierarchical local SGD. Two variants of the latter are
timed too: one uses all-to-alls even if groups span two hosts, and one applies each average at the next
synchronization. As in figure 5, 4 groups synchronize every 8 steps, and as in figure 9, 8 groups every 4
steps. All use buckets of 0.25 MB.

"predicted" is what `hpcsgd.cost` predicts from the rate of the links and from guesses for everything else.
"cores" is the number of cores that all ranks keep busy. If it comes near to the number of cores of the
machine, steps take longer than they would on separate hosts. The benchmark takes five minutes, one of which
is spent starting; --ranks and --keep divide it.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from harness import Goal, Run, Spread, print_table
from harness.hosts import on_hosts, shaped_hosts
from strong_scaling import picture
from strong_scaling.places import (
    BASELINE,
    BITS,
    COMPUTE,
    DDP,
    FIGURES,
    OURS,
    RANKS,
    RANKS_PER_HOST,
    RATE,
    SYNC,
    Place,
    hosts,
)  # fmt: skip
from strong_scaling.prediction import predicted

SCRIPT = Path(__file__).with_suffix("") / "rank.py"
BURST = "16kb"
Row = dict[str, Any]


def measured(ranks: Sequence[int], compute: float, rounds: int) -> list[Row]:
    """Return the rows; one rank alone would compute for `compute` seconds per step."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # otherwise it warns of hosts without names
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, shaped_hosts(hosts(max(ranks)), RATE, BURST) as name:
        for N in ranks:
            out = Path(folder) / f"{N}.json"
            words = ["--out", str(out), "--seconds", str(compute / N), "--rounds", str(rounds)]
            on_hosts(name, hosts(N), SCRIPT, words, 600, min(N, RANKS_PER_HOST))
            rows += [{"compute": compute / N, **row} for row in json.loads(out.read_text())]
    return rows


def judged(rows: Sequence[Row]) -> list[Row]:
    """Add the cost model's predictions, and the speed-ups if there is a run of one rank."""
    alone = [row for row in rows if row["ranks"] == 1]
    found = []
    for row in sorted(rows, key=lambda row: row["ranks"]):
        place = Place(row["who"], row["figure"], row["P"], row["K"])
        told = None if place.who == DDP else predicted(place, row["compute"])
        more: Row = {"predicted": told, "speedup": None, "predicted_speedup": None}
        if alone:
            more["speedup"] = median(alone[0]["seconds"]) / median(row["seconds"])
            more["predicted_speedup"] = alone[0]["compute"] / told if told else None
        found.append({**row, **more})
    return found


def goals(rows: Sequence[Row]) -> list[Goal]:
    """Return the goals for the most ranks: no slower than the baseline or than the faster synchronous SGD."""
    most = [row for row in rows if row["ranks"] == max(each["ranks"] for each in rows)]
    seconds = {(row["figure"], row["who"]): median(row["seconds"]) for row in most}
    together = {who: seconds["", who] for who in (SYNC, DDP) if ("", who) in seconds}
    found = []
    best = min(together, key=together.__getitem__)
    for name in FIGURES:
        if (name, OURS) in seconds:
            rivals = {
                BASELINE: seconds[name, BASELINE],
                f"the faster synchronous SGD ({best})": together[best],
            }
            what = f"as {name}, {most[0]['ranks']} ranks: seconds of {OURS} over"
            found += [
                Goal(f"{what} {who}", seconds[name, OURS] / rival, 1.0) for who, rival in rivals.items()
            ]
    return found


def cells(row: Row) -> list[object]:
    told, sent = row["predicted"], row["sent"]
    speedups = [f"{x:.2f}" if x else "" for x in (row["speedup"], row["predicted_speedup"])]
    return [
        row["ranks"], row["figure"] or "both", f"{row['P']} × {row['K']}", row["who"],
        Spread.of(row["seconds"]), f"{told:.3f}" if told else "", *speedups,
        f"{sent / 1e6:.2f}", f"{sent * 8 / BITS:.3f}",
        f"{row['cpu'] * row['ranks'] / median(row['seconds']):.2f}",
    ]  # fmt: skip


HEAD = ["ranks", "as", "P × K", "who", "s/step (quartiles)", "predicted", "speed-up", "predicted"]
HEAD += ["MB a host", "÷ rate", "cores"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Strong scaling on hosts with slow links.")
    parser.add_argument("--ranks", type=int, nargs="+", choices=RANKS, default=list(RANKS), metavar="N")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="check within a minute that it runs")
    parser.add_argument(
        "--keep", type=Path, nargs="+", metavar="FILE", default=[], help="--json files of other --ranks"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot of the speed-up against the ranks")
    given = parser.parse_args()
    ranks, rounds, compute = given.ranks, given.rounds, COMPUTE
    if given.quick:
        ranks, rounds, compute = [1, 4], 1, COMPUTE / 4
    run = Run()
    kept = [row for file in given.keep for row in run.kept(file) if row["ranks"] not in ranks]
    rows = judged(kept + measured(ranks, compute, rounds))
    print_table(map(cells, rows), HEAD)
    if given.plot:
        picture.draw(rows, given.plot)
    run.conclude(rows, goals(rows), given.json, {"rate": RATE, "hosts": hosts(max(RANKS))})


if __name__ == "__main__":
    main()
