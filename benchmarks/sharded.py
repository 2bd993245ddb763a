"""Seconds a step of a model that torch shards in each group, beside torch's HSDP; needs root and iproute2.

    python benchmarks/sharded.py [--quick] [--rates NAME …] [--keep FILE] [--json FILE]

P hosts of K ranks, each host a group: 4 × 2 and 2 × 4, with links of 100 Mbit/s and 1 Gbit/s, and all ranks
on this machine ("shared memory"). Twelve layers of 707² parameters, 6.0 million, which `fully_shard` shards
one by one. Computing is emulated: ranks sleep, layer by layer, forward a third and backward two. Messages and
the update, by AdamW, are real: torch's by gloo, ours between groups by MPI.

Torch's HSDP shards over the mesh (replicate × shard) and updates DTensors. Beside it our `bsp`, also with
gradients that cross groups only after the backward pass, and what meets every 8 steps. "Groups alone": each
trains for itself, by torch; whoever shards does as much. Sent is what leaves the interface of a host. The
limit is what has to leave it, 2·(P−1)/P·M of 4 bytes for every step or every meeting, over the rate of its
link. Cores: how many all ranks keep busy; where that comes near to what there are, steps are longer than on
hosts of their own. Ten minutes; --rates and --keep divide them.
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
"""Goal of bsp over torch's HSDP: the same messages."""
SCRIPT = Path(__file__).with_suffix("") / "rank.py"
Row = dict[str, Any]


def measured(setting: Setting) -> list[Row]:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # hosts without names are warned of otherwise
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
    """Seconds a step that the link of a host needs."""
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
        description="Sharded models on hosts with slow links, beside torch's HSDP."
    )
    parser.add_argument(
        "--rates", nargs="+", choices=[MEMORY, *RATES], default=[MEMORY, *RATES], metavar="NAME"
    )
    parser.add_argument("--quick", action="store_true", help="a minute: that it runs, not what it measures")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="what only an earlier --json has")
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
