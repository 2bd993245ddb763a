"""Figures in docs/muon.md about time and memory."""

from __future__ import annotations

from website.measured.results import over, row, table

LINES = {
    "Muon, one owner for each matrix": "Muon, one owner for each matrix",
    "Muon, all update everything": "Muon, everybody updates everything",
    "AdamW": "AdamW",
}


def cost() -> str:
    of = {name: row("muon", who=who) for name, who in LINES.items()}
    return table(
        [
            name,
            f"{1e3 * each['seconds_a_step']['median']:.0f}",
            over(each["ratio"]["median"]),
            f"{each['state_bytes_at_most'] / 1e6:.1f}",
        ]
        for name, each in of.items()
    )
