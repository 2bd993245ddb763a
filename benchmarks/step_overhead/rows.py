"""Rows of the steps of all contestants on a number of ranks, with their goals and cells of the table."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from harness import Goal, Spread, on_ranks

ONE_RANK, SEVERAL = 1.03, 1.0
"""Goals: ratios of seconds per step."""


def measured(
    n: int, rounds: int, steps: int, timeout: float, device: str = "cpu"
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        script = Path(__file__).with_name("rank.py")
        words = ["--out", str(out), "--rounds", str(rounds), "--steps", str(steps), "--device", device]
        on_ranks(n, script, words, timeout)
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


HEAD = ["ranks", "model", "who", "ms/step", "floor", "sent MB", "ratio (quartiles)", "CPU time", "against"]
