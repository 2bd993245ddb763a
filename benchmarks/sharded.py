"""Seconds per step of an FSDP model in each group, compared with torch's HSDP; needs root and iproute2.

    python benchmarks/sharded.py [--quick] [--rates NAME …] [--keep FILE] [--json FILE]

There are P hosts of K ranks, and each host is a group: 4 × 2 and 2 × 4, with links of 100 Mbit/s and 1
Gbit/s, and all ranks on this machine ("shared memory"). The model has twelve layers of 707² parameters, 6.0
million in all, which `fully_shard` shards one by one. Computing is emulated: ranks sleep, layer by layer, a
third of the time in the forward pass and the rest in the backward pass. Messages and the update by AdamW are
real. Torch's messages go through gloo; ours between groups go through MPI.

Torch's HSDP shards over the mesh (replicate × shard) and updates DTensors. It is compared with our `bsp`,
with `bsp` whose gradients cross groups only after the backward pass, and with methods that synchronize every
8 steps. In "groups alone" each group trains for itself, by torch; every FSDP model needs at least that time.
"MB a host" is what leaves the interface of a host. "limit" is the least number of bytes that have to leave
it, 2·(P−1)/P·M of 4 bytes for every step or every synchronization, divided by the rate of its link. "cores"
is the number of cores that all ranks keep busy. If it comes near to the number of cores of the machine, steps
take longer than they would on separate hosts. The benchmark takes ten minutes; --rates and --keep divide it.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from harness import Goal, Run, Spread, on_ranks, print_table, ratios
from harness.hosts import on_hosts, shaped_hosts
from sharded.contestants import ALONE, BSP, HSDP, LOCAL
from sharded.settings import MEMORY, MODEL, QUICK, RATES, SETTINGS, Setting
from step_time.networks import LAYERS, WIDTH

SAME = 1.05
"""Goal for bsp relative to torch's HSDP, because both send the same messages."""
SCRIPT = Path(__file__).with_suffix("") / "rank.py"
Row = dict[str, Any]


def measured(setting: Setting) -> list[Row]:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # otherwise it warns of hosts without names
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        words = ["--out", str(out), "--setting", json.dumps(asdict(setting))]
        if setting.rate == MEMORY:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            on_ranks(setting.P * setting.K, SCRIPT, words, 600)
        else:
            with shaped_hosts(setting.P, setting.rate) as name:
                on_hosts(name, setting.P, SCRIPT, words, 600, setting.K)
        return json.loads(out.read_text())


def limit(row: Row) -> float | None:
    """Return the seconds per step that the link of a host needs."""
    if row["rate"] == MEMORY or row["who"] == ALONE:
        return None
    M = LAYERS[MODEL] * WIDTH**2
    return 2 * (row["P"] - 1) / row["P"] * 4 * M * 8 / RATES[row["rate"]] / row["period"]


def judged(rows: Sequence[Row]) -> list[Row]:
    found = []
    for row in rows:
        (rival,) = (each for each in rows if place(each) == place(row) and each["who"] == HSDP)
        against = asdict(ratios(row["seconds"], rival["seconds"]))
        found.append({**row, "limit": limit(row), "ratio": against})
    return found


def belongs(row: Row, setting: Setting) -> bool:
    return place(row) == (setting.rate, setting.P, setting.K)


def place(row: Row) -> tuple[str, int, int]:
    return row["rate"], row["P"], row["K"]


def goals(rows: Sequence[Row]) -> list[Goal]:
    found = []
    for row in rows:
        name = f"{row['rate']}, {row['P']} × {row['K']}: seconds of {row['who']} over {HSDP}"
        if row["who"] == BSP:
            found.append(Goal(name, row["ratio"]["median"], SAME))
        if row["who"] == LOCAL and row["rate"] != MEMORY:
            found.append(Goal(name, row["ratio"]["median"], 1.0))
    return found


def cells(row: Row) -> list[object]:
    bound, busy = row["limit"], row["cpu"] * row["P"] * row["K"] / median(row["seconds"])
    return [
        row["rate"], f"{row['P']} × {row['K']}", row["who"], Spread.of(row["seconds"]),
        f"{bound:.3f}" if bound else "", f"{row['sent'] / 1e6:.2f}" if bound else "",
        f"{busy:.2f}", "" if row["who"] == HSDP else Spread(**row["ratio"]),
    ]  # fmt: skip


HEAD = ["rate", "P × K", "who", "s/step (quartiles)", "limit", "MB a host", "cores", f"over {HSDP}"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="FSDP models on hosts with slow links, compared with torch's HSDP."
    )
    parser.add_argument(
        "--rates", nargs="+", choices=[MEMORY, *RATES], default=[MEMORY, *RATES], metavar="NAME"
    )
    parser.add_argument("--quick", action="store_true", help="check within a minute that it runs")
    parser.add_argument(
        "--keep", type=Path, metavar="FILE", help="an earlier --json file, for other settings"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    run = Run()
    chosen = [each for each in (QUICK if given.quick else SETTINGS) if each.rate in given.rates]
    rows = [row for row in run.kept(given.keep) if not any(belongs(row, each) for each in chosen)]
    for setting in chosen:
        rows += measured(setting)
        if given.json:
            run.write(given.json, rows)
    rows = judged(rows)
    print_table(map(cells, rows), HEAD)
    run.conclude(rows, goals(rows), given.json)


if __name__ == "__main__":
    main()
