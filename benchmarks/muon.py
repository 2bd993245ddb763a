"""The savings when each matrix has one owner among the four ranks of a group: a step of Muon, and its state.

    python benchmarks/muon.py [--quick] [--json FILE]

A small GPT trains by the synchronous method. Contestants take turns in the same processes. "Everybody updates
everything" is the behavior for an optimizer that is not known to treat each tensor separately: gradients are
gathered, and every rank of the group computes the whole update. A step of AdamW shows the time that both have
in addition.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from harness import Goal, Run, Spread, on_ranks, print_table
from muon import ADAMW, EVERYBODY, OWNED

RANKS = 4
ADDED = 1.25 / RANKS
"""Goal: seconds of a step beyond those of AdamW, relative to "everybody".

They are the iterations of the update.
"""
LESS = 1.1 / RANKS
"""Goal: bytes of state, relative to "everybody"."""
HEAD = ["ranks", "million parameters", "who", "ms/step", "over everybody (quartiles)", "state MB", "sent MB"]


def measured(width: int, layers: int, rounds: int, steps: int, timeout: float) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        said = {"out": out, "width": width, "layers": layers, "rounds": rounds, "steps": steps}
        words = [word for name, value in said.items() for word in (f"--{name}", str(value))]
        on_ranks(RANKS, Path(__file__).with_suffix("") / "rank.py", words, timeout)
        return json.loads(out.read_text())


def goals(rows: list[dict[str, Any]]) -> list[Goal]:
    seconds = {row["who"]: row["seconds_a_step"]["median"] for row in rows}
    added = (seconds[OWNED] - seconds[ADAMW]) / (seconds[EVERYBODY] - seconds[ADAMW])
    state = {row["who"]: row["state_bytes_at_most"] for row in rows}
    return [
        Goal("seconds more than with AdamW, one owner over everybody", added, ADDED),
        Goal("bytes of state of a rank, one owner over everybody", state[OWNED] / state[EVERYBODY], LESS),
    ]


def cells(row: dict[str, Any]) -> list[object]:
    return [
        row["ranks"], f"{row['numel'] / 1e6:.2f}", row["who"], f"{1e3 * row['seconds_a_step']['median']:.0f}",
        str(Spread(**row["ratio"])), f"{row['state_bytes_at_most'] / 1e6:.2f}",
        f"{row['bytes_a_step'] / 1e6:.2f}",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Savings when each matrix has one owner.")
    parser.add_argument("--quick", action="store_true", help="check within seconds that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    run = Run()
    if arguments.quick:
        rows = measured(64, 4, rounds=2, steps=1, timeout=120)
    else:
        rows = measured(256, 4, rounds=10, steps=1, timeout=900)
    print_table(map(cells, rows), HEAD)
    run.conclude(rows, goals(rows), arguments.json)


if __name__ == "__main__":
    main()
