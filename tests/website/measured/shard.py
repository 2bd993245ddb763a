"""Figures in docs/shard.md about time."""

from __future__ import annotations

from statistics import median

from website.measured.results import row, table

LINKS = {"shared memory": "shared memory", "1 Gbit/s": "1gbit", "100 Mbit/s": "100mbit"}


def speed() -> str:
    lines = []
    for name, rate in LINKS.items():
        of = {
            who: row("sharded", who=who, rate=rate, P=4, K=2)
            for who in ("torch HSDP", "bsp", "hierarchical(8)")
        }
        seconds = {who: f"{median(each['seconds']):.3f}" for who, each in of.items()}
        cells = [name, seconds["torch HSDP"]]
        for who in ("bsp", "hierarchical(8)"):
            cells += [seconds[who], f"{of[who]['ratio']['median']:.2f}"]
        lines.append(cells)
    return table(lines)
