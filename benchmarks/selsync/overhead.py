"""`selsync.py --overhead`: time of a step with Δ and its exchange, relative to one without, on two ranks."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from harness import Goal, Spread, on_ranks, print_table

HEAD = "what,ms,over a step without Δ"


def measure(
    store: Path, quick: bool, plot: Path | None
) -> tuple[list[dict[str, Any]], list[Goal], dict[str, Any]]:
    del store, plot
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        arguments = ["--out", str(out), "--rounds", "3" if quick else "20", "--steps", "2" if quick else "5"]
        on_ranks(2, Path(__file__).with_name("overhead_rank.py"), arguments, timeout=1800)
        rows = json.loads(out.read_text())
    print_table(
        [
            [row["what"], f"{1e3 * row['seconds']['median']:.3f}",
             Spread(**row["ratio"]) if "ratio" in row else ""] for row in rows
        ],
        HEAD.split(","),
    )  # fmt: skip
    by = {row["what"]: row for row in rows}
    step, norm = (by[what]["seconds"]["median"] for what in ("step, ResNet-20, batch 32", "Δ: squared norm"))
    goals = [
        Goal("Δ over a step", norm / step, 0.01),
        Goal("ms of the exchange, two ranks", 1e3 * by["exchange of 8 bytes"]["seconds"]["median"], 1.0),
        Goal(
            "a step with Δ and its exchange over one without",
            by["the same with SelSync"]["ratio"]["median"],
            1.01,
        ),
    ]
    return rows, goals, {}
