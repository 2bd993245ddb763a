"""Time that the communication thread adds to the library's collectives, compared with mpi4py over sizes.

    python benchmarks/alpha_beta.py [--quick] [--rate 1000] [--json FILE]

It runs on 2 and 4 ranks of one host and, as root, on 4 hosts with shaped links. The library's operations are
nonblocking calls through a communication thread, which polls with pauses. mpi4py's are blocking calls on
numpy buffers, which wait without a pause. They take turns, one block of calls each. Each ratio compares
neighboring blocks and takes the slowest rank. If the programs of the OSU micro-benchmarks (osu_allreduce, …)
are in PATH, the table also has their averages.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from alpha_beta.osu import nearest, seconds
from harness import Goal, Run, Spread, on_ranks, print_table
from harness.hosts import on_hosts, shaped_hosts

SCRIPT = Path(__file__).with_suffix("") / "rank.py"
HOSTS = 4
LARGE = 1 << 20
SMALL = 64
LARGE_RATIO, ADDED = 1.1, 50.0
"""Goals: our time over mpi4py's for large messages, and the µs that the thread may add to small ones."""


@dataclass(frozen=True)
class Extent:
    sizes: tuple[int, ...]
    rounds: int


QUICK = Extent((8, 1 << 15, 1 << 21), 3)
FULL = Extent((8, 1 << 9, 1 << 12, 1 << 15, 1 << 18, 1 << 21, 1 << 24, 1 << 26), 15)
ON_HOSTS = {
    QUICK: Extent((8, 1 << 15, 1 << 20), 2),
    FULL: Extent((8, 1 << 9, 1 << 12, 1 << 15, 1 << 18, 1 << 22), 9),
}


def on_one_host(n: int, extent: Extent) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        on_ranks(n, SCRIPT, _words(out, extent), timeout=1800)
        rows = json.loads(out.read_text())
    known = seconds(n, max(extent.sizes))
    for row in rows:
        row |= {"hosts": 1, "osu_seconds": nearest(known.get(row["operation"], {}), row["bytes"])}
    return rows


def on_shaped_hosts(rate: int, extent: Extent) -> list[dict[str, Any]]:
    """Measure with one rank on each host."""
    with tempfile.TemporaryDirectory() as folder, shaped_hosts(HOSTS, f"{rate}mbit", "32kb") as name:
        out = Path(folder) / "rows.json"
        on_hosts(name, HOSTS, SCRIPT, _words(out, extent), timeout=1800)
        return [{**row, "hosts": HOSTS, "osu_seconds": None} for row in json.loads(out.read_text())]


def _words(out: Path, extent: Extent) -> list[str]:
    return ["--out", str(out), "--rounds", str(extent.rounds), "--sizes", *map(str, extent.sizes)]


def goals(rows: Sequence[dict[str, Any]]) -> list[Goal]:
    """Return the goals, which are for medians over the operations."""
    found = []
    for hosts, ranks in sorted({(row["hosts"], row["ranks"]) for row in rows}):
        here = [row for row in rows if (row["hosts"], row["ranks"]) == (hosts, ranks)]
        large = [row["ratio"]["median"] for row in here if row["bytes"] >= LARGE]
        added = [
            1e6 * (row["ours"]["median"] - row["theirs"]["median"]) for row in here if row["bytes"] < SMALL
        ]
        name = f"{ranks} ranks on {hosts} host(s)"
        found.append(Goal(f"{name}: ours over mpi4py's, a megabyte and more", median(large), LARGE_RATIO))
        found.append(
            Goal(f"{name}: µs that the communication thread adds to a small message", median(added), ADDED)
        )
    return found


HEAD = ["hosts", "ranks", "operation", "bytes", "ours µs", "mpi4py µs", "ratio (quartiles)", "OSU µs"]


def cells(row: dict[str, Any]) -> Sequence[object]:
    osu = f"{1e6 * row['osu_seconds']:.1f}" if row["osu_seconds"] else ""
    ours, theirs = (f"{1e6 * row[who]['median']:.1f}" for who in ("ours", "theirs"))
    ratio = Spread(**row["ratio"])
    return [row["hosts"], row["ranks"], row["operation"], row["bytes"], ours, theirs, ratio, osu]


def main() -> None:
    parser = argparse.ArgumentParser(description="Time that the communication thread adds to collectives.")
    parser.add_argument("--rate", type=int, default=1000, help="Mbit/s of each host's link")
    parser.add_argument("--quick", action="store_true", help="check within a minute that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    run = Run()
    extent = QUICK if given.quick else FULL
    rows = [row for n in (2, 4) for row in on_one_host(n, extent)]
    if os.geteuid() == 0 and shutil.which("ip"):
        rows += on_shaped_hosts(given.rate, ON_HOSTS[extent])
    else:
        print("hosts with shaped links are left out: they need root and iproute2")
    print_table(map(cells, rows), HEAD)
    run.conclude(rows, goals(rows), given.json, {"mbit_per_s": given.rate})


if __name__ == "__main__":
    main()
