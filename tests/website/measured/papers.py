"""Figures in docs/papers.md about the papers' tables."""

from __future__ import annotations

from papers.beside.hierarchical import TABLE_1
from probe_vs_accuracy import means, parted
from website.measured.results import goal, result, row, rows


def hierarchical() -> str:
    _, trained = parted(result("probe_vs_accuracy")["rows"], ["cifar10_small"])
    ours, theirs = 100 * (means(trained)[1] - means(trained)[4]), TABLE_1[1] - TABLE_1[4]
    return f"In table 1 P = 4 loses {ours:.1f} points, in the paper {theirs:.1f}."


def selsync() -> str:
    behind = goal("selsync_table", "points of accuracy behind BSP of a SelSync 6 times as fast")
    fedavg = [each["accuracy"] for each in rows("selsync_table") if "FedAvg" in each["who"]]
    assert max(fedavg) >= row("selsync_table", who="BSP")["accuracy"]
    return f"In table 1 SelSync loses {behind:.1f} points to `bsp`, and FedAvg loses nothing."
