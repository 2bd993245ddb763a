"""Figures in docs/selsync.md about speed, partitions and labels."""

from __future__ import annotations

from website.measured.results import from_to, over, result, row, rows, table

CONTESTANTS = {
    "`bsp`": "BSP",
    "FedAvg (1, 0.25)": "FedAvg (1, 0.25)",
    "FedAvg (1, 0.125)": "FedAvg (1, 0.125)",
    "SSP s = 100": "SSP s = 100",
    "SelSync δ = 0.3": "SelSync δ = 0.3",
    "SelSync δ = 0.4": "SelSync δ = 0.4",
    "SelSync δ = 0.5": "SelSync δ = 0.5",
}
BY_LABEL = {
    "FedAvg (1, 0.1)": "FedAvg (1, 0.1)",
    "SelSync δ = 0.3": "SelSync δ = 0.3",
    "SelSync δ = 0.05, injection (0.5, 0.5)": "SelSync (0.5, 0.5, 0.05)",
    "SelSync δ = 0.3, injection (0.5, 0.5)": "SelSync (0.5, 0.5, 0.3)",
}
LSSR = {"BSP": "0", "SSP s = 100": "–"}
"""The text for contestants without a measured LSSR."""


def cells(who: str) -> list[str]:
    each = row("selsync_table", who=who)
    return [
        LSSR[who] if each["lssr"] is None else f"{each['lssr']:.3f}",
        f"{100 * each['accuracy']:.2f}",
        f"{each['seconds']:.0f}",
        f"{sum(each['bytes_per_phase'].values()) / 1e6:.1f}",
        over(each["speed"]),
    ]


def speed() -> str:
    return table([name, *cells(who)] for name, who in CONTESTANTS.items())


def links() -> str:
    kilobits = result("selsync_table")["machine"]["rate"].removesuffix("kbit")
    return f"8 workers on emulated hosts with links of {int(kilobits) / 1000} Mbit/s"


def communicating() -> str:
    times = result("selsync_table")["machine"]["communication_over_computing"]
    return f"`bsp` communicates {times:.1f} times as long as it computes:"


def lost() -> str:
    best = row("selsync_table", who="BSP")["accuracy"]
    points = [100 * (best - each["accuracy"]) for each in rows("selsync_table") if "SelSync" in each["who"]]
    return f"SelSync's speed follows from its LSSR; it loses {from_to(points, 1)} points."


def partitions() -> str:
    lines = []
    for partition in ("seldp", "defdp"):
        for name, what in (("models", "parameters"), ("gradients", "gradients")):
            found = rows("selsync_partition", partition=partition, aggregate=what)
            accuracies = ", ".join(f"{100 * each['accuracy']:.2f}" for each in found)
            lines.append(
                [f"`{partition}`", name, accuracies, ", ".join(f"{each['lssr']:.2f}" for each in found)]
            )
    return table(lines)


def by_label() -> str:
    of = {name: row("selsync_non_iid", who=who) for name, who in BY_LABEL.items()}
    return table(
        [name, each["steps"], f"{each['lssr']:.3f}", f"{100 * each['accuracy']:.2f}"]
        for name, each in of.items()
    )
