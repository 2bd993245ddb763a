"""Figures in docs/muon.md about time and memory."""

from __future__ import annotations

from website.measured.results import over, row, rows, table

LINES = {
    "Muon, one owner for each matrix": "Muon, one owner for each matrix",
    "Muon, all update everything": "Muon, everybody updates everything",
    "AdamW": "AdamW",
}


def setting() -> str:
    ((numel, ranks),) = {(each["numel"], each["ranks"]) for each in rows("muon")}
    return f"A GPT of {numel / 1e6:.1f} million parameters, `bsp`, one group of {ranks} ranks"


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
