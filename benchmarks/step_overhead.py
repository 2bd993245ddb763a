"""What hpcsgd adds to a training step: one rank against plain torch, four against DistributedDataParallel.

    python benchmarks/step_overhead.py [--quick] [--json FILE]

Contestants take turns in the same processes, so that what else the machine does falls out of their ratios.
The floor of a step is what the ranks need without communication, all at once, plus one copy in memory of
every byte sent, nothing of it hidden behind computation.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from harness import Goal, Run, Spread, on_ranks, print_table

RANKS = 4
ONE_RANK, SEVERAL = 1.03, 1.0
"""Goals: ratios of seconds per step."""


def measured(
    n: int, rounds: int, steps: int, timeout: float
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        script = Path(__file__).with_suffix("") / "rank.py"
        on_ranks(n, script, ["--out", str(out), "--rounds", str(rounds), "--steps", str(steps)], timeout)
        result = json.loads(out.read_text())
    rows, rates = result["rows"], result["rates"]
    alone = {row["model"]: row["seconds_a_step"]["median"] for row in rows if row["who"] == "compute only"}
    for row in rows:
        if row["model"] in alone and "bytes_a_step" in row:
            row["floor_seconds"] = alone[row["model"]] + row["bytes_a_step"] / rates["memory_copy"]
    return rows, rates


def goals(rows: list[dict[str, Any]]) -> list[Goal]:
    found = []
    for row in rows:
        name = f"{row['model']}, {row['ranks']} rank(s): {row['who']} over {row.get('against')}"
        if row["ranks"] == 1 and "ratio" in row:
            found.append(Goal(name, row["ratio"]["median"], ONE_RANK))
        elif row["who"].startswith("hpcsgd bsp"):
            found.append(Goal(name, row["ratio"]["median"], SEVERAL))
    return found


def cells(row: dict[str, Any]) -> list[object]:
    def milliseconds(value: float | None) -> str:
        return "" if value is None else f"{1e3 * value:.1f}"

    ratio, cpu = (str(Spread(**row[key])) if key in row else "" for key in ("ratio", "cpu_ratio"))
    sent = f"{row['bytes_a_step'] / 1e6:.2f}" if row.get("bytes_a_step") else ""
    median = milliseconds(row["seconds_a_step"]["median"])
    floor = milliseconds(row.get("floor_seconds"))
    return [row["ranks"], row["model"], row["who"], median, floor, sent, ratio, cpu, row.get("against", "")]


def main() -> None:
    parser = argparse.ArgumentParser(description="What hpcsgd adds to a training step.")
    parser.add_argument("--quick", action="store_true", help="a minute: that it runs, not what it measures")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    run = Run()
    if arguments.quick:
        rows, _ = measured(1, rounds=3, steps=2, timeout=120)
        more, rates = measured(RANKS, rounds=2, steps=1, timeout=240)
    else:
        rows, _ = measured(1, rounds=16, steps=4, timeout=1800)
        more, rates = measured(RANKS, rounds=10, steps=3, timeout=3600)
    rows += more
    head = [
        "ranks",
        "model",
        "who",
        "ms/step",
        "floor",
        "sent MB",
        "ratio (quartiles)",
        "CPU time",
        "against",
    ]
    print_table(map(cells, rows), head)
    print(", ".join(f"{name} {rate / 1e9:.2f} GB/s a rank" for name, rate in rates.items()))
    run.conclude(rows, goals(rows), arguments.json, {"bytes_a_second_a_rank": rates})


if __name__ == "__main__":
    main()
