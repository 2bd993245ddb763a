"""`selsync.py --table`: Table I of the SelSync paper on a small scale, with links as slow as in the paper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness import Goal, print_table
from harness.hosts import shaped_hosts
from hpcsgd.data import ImageDataset
from hpcsgd.files.pictures import STYLE, save
from selsync.trainings import BATCH, job, on_shaped, train

WORKERS = 8
RATE = "1500kbit"
"""Rate of a link.

With it BSP communicates some twenty times as long as it computes. In the paper VGG11, 507 MB, crosses 5 Gb/s
in 0.8 s, and a step computes for some hundredths of a second.
"""
EPOCHS = 8
"""Passes over the data by all workers together; with SelDP every worker sees all data once in these."""
FAST = 6
SELDP, DEFDP = {"partition": {"name": "seldp"}}, {"partition": {"name": "defdp"}}
CONTESTANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "BSP": ({"name": "bsp"}, {}),
    **{
        f"FedAvg ({C:g}, {E:g})": ({"name": "fedavg", "fraction": C, "per_epoch": int(1 / E)}, DEFDP)
        for C in (1.0, 0.5)
        for E in (0.25, 0.125)
    },
    **{f"SSP s = {s}": ({"name": "ssp", "max_staleness": s}, DEFDP) for s in (100, 200)},
    **{f"SelSync δ = {d}": ({"name": "selsync", "delta": d}, SELDP) for d in (0.3, 0.4, 0.5)},
}
PAPER = {
    "BSP": ("0", "90.9", "1"),
    "FedAvg (1, 0.25)": ("0.979", "87.56", "–"),
    "FedAvg (1, 0.125)": ("0.959", "88.2", "–"),
    "FedAvg (0.5, 0.25)": ("0.979", "84.6", "–"),
    "FedAvg (0.5, 0.125)": ("0.959", "85.16", "–"),
    "SSP s = 100": ("–", "68.72", "–"),
    "SSP s = 200": ("–", "68.78", "–"),
    "SelSync δ = 0.3": ("0.912", "91.33", "6.16"),
    "SelSync δ = 0.4": ("", "", ""),
    "SelSync δ = 0.5": ("0.937", "91.32", "13.75"),
}
"""LSSR, accuracy in % and speed-up of VGG11 on CIFAR-100, 16 V100 at 5 Gb/s."""
HEAD = "who,steps,LSSR,accuracy %,s,MB sent,speed,as good as BSP,paper: LSSR,accuracy %,speed-up"


def measure(
    store: Path, quick: bool, plot: Path | None
) -> tuple[list[dict[str, Any]], list[Goal], dict[str, Any]]:
    workers = 2 if quick else WORKERS
    names = ["BSP", "SelSync δ = 0.3"] if quick else list(CONTESTANTS)
    epochs = workers if quick else EPOCHS
    steps = len(ImageDataset(store, "train")) // (BATCH * workers) * epochs
    rows = []
    with shaped_hosts(workers, "100mbit" if quick else RATE, "16kb") as hosts:
        for name in names:
            method, data = CONTESTANTS[name]
            groups = 1 if name == "BSP" else workers
            passes = epochs // workers if data is SELDP else epochs
            table = job(store, method, groups, passes, steps=steps, workers=workers, **data)
            row = {"who": name, **train(on_shaped(hosts, workers), table)}
            print(f"{name}: {row['accuracy']:.4f} after {row['seconds']:.0f} s", flush=True)
            rows.append(row)
    bsp = rows[0]
    for row in rows:
        row["speed"] = bsp["seconds"] / bsp["steps"] / (row["seconds"] / row["steps"])
    phases = bsp["seconds_per_phase"]
    ratio = sum(s for phase, s in phases.items() if phase not in ("compute", "data")) / phases["compute"]
    print_table([cells(row, bsp) for row in rows], HEAD.split(","))
    print(f"{workers} hosts at {RATE}: BSP communicates {ratio:.1f} times as long as it computes")
    if plot:
        draw(plot, rows)
    return rows, goals(rows), {"hosts": workers, "rate": RATE, "communication_over_computing": ratio}


def goals(rows: list[dict[str, Any]]) -> list[Goal]:
    """Return the goals: six times as fast as BSP, and as accurate."""
    bsp = rows[0]["accuracy"]
    ours = [row for row in rows if "SelSync" in row["who"]]
    fast = [row["accuracy"] for row in ours if row["speed"] >= FAST]
    good = [row["speed"] for row in ours if row["accuracy"] >= bsp]
    found = [Goal("seconds of the fastest SelSync over BSP", 1 / max(row["speed"] for row in ours), 1 / FAST)]
    if fast:
        behind = 100 * (bsp - max(fast))
        found.append(Goal(f"points of accuracy behind BSP of a SelSync {FAST} times as fast", behind, 0))
    if good:
        found.append(Goal("seconds over BSP of a SelSync as good", 1 / max(good), 1 / FAST))
    return found


def cells(row: dict[str, Any], bsp: dict[str, Any]) -> list[object]:
    lssr = {"BSP": 0.0}.get(row["who"], row["lssr"])
    return [
        row["who"], row["steps"], "–" if lssr is None else f"{lssr:.3f}",
        f"{100 * row['accuracy']:.2f}", f"{row['seconds']:.0f}",
        f"{sum(row['bytes_per_phase'].values()) / 1e6:.1f}", f"{row['speed']:.2f}",
        "yes" if row["accuracy"] >= bsp["accuracy"] else "no",
        *PAPER[row["who"]],
    ]  # fmt: skip


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    """Draw accuracy against time for each evaluation; SelDP has one, at the end."""
    with rc_context(STYLE):
        figure = Figure(figsize=(9, 4.6), layout="constrained", dpi=120)
        _draw(figure.subplots(), rows)
        save(figure, path)


def _draw(axes: Axes, rows: list[dict[str, Any]]) -> None:
    for i, row in enumerate(rows):
        seconds, accuracy = [s for _, s, _ in row["curve"]], [100 * a for _, _, a in row["curve"]]
        style = "*" if len(seconds) == 1 else "o-"
        axes.plot(seconds, accuracy, style, ms=14 if style == "*" else 4, color=f"C{i}", label=row["who"])
    axes.set(xscale="log", xlabel="seconds of training", ylabel="test accuracy, %", ylim=(90, None))
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
