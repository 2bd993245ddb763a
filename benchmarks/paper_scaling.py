"""The papers' scaling, as their own cost models predict it, compared with what they measured.

    python benchmarks/paper_scaling.py [--quick] [--json FILE] [--plot FILE]

SGP (Assran et al., ICML 2019, table 1): hours of 90 epochs of ResNet-50 on ImageNet over 10 Gb/s Ethernet.
Two constants are taken from the paper's own figures at 16 nodes. The time that a node computes is from
1-OSGP, all of whose messages are hidden. The time of a byte is from SGP, whose one message is not hidden.
Everything else follows from them. The hours of AR-SGD grow with log₂ n, as for an allreduce by recursive
doubling, which sends log₂ n times the model. They do not grow as in eq. 3, which is the least that an
allreduce can send.

Hierarchical local SGD (Lee et al., IEEE Big Data 2020, figures 5, 6, 9 and 10): the paper gives curves, not
numbers, and the constants below are ours. The comparison is of the number of processes beyond which more of
them no longer help. In the paper's equations, unlike in its figures, reducing gradients inside groups takes
about as long as among all processes, because the bytes of an allreduce hardly depend on the number of
processes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness import Goal, Run, print_table
from hpcsgd.cost.papers import (
    Setting,
    allreduce_epoch,
    allreduce_step,
    gossip_step,
    hierarchical_epoch,
    overlap_step,
    synchronous_epoch,
)
from hpcsgd.files.pictures import STYLE, save

NODES = np.array([4, 8, 16, 32])
HOURS = {
    "AR-SGD": [22.0, 14.0, 8.5, 5.1],
    "D-PSGD": [19.7, 9.7, 5.0, 2.6],
    "SGP": [11.8, 5.9, 3.2, 1.7],
    "1-OSGP": [None, None, 1.8, None],
}
"""Hours from the paper's table, for each number of nodes."""
RESNET50 = 25_557_032 * 4.0
"""Size of the model in bytes."""
STEPS = 90 * 1_281_167 / (256 * NODES)
"""Number of steps in 90 epochs, with 256 samples per node."""
LATENCY = 50e-6
"""Seconds of a message over TCP; negligible for a model of 102 MB."""
AT_16 = 2

LOOKS = {"synchronous": ("-", 4.0), "allreduce-based": ("-", 2.0), "hierarchical": ("--", 1.6)}
"""Style and width of each line, because lines lie on each other."""
PROCESSES = np.array([1, 2, 4, 8, 16, 32, 64, 128])
FIGURES = {
    "figure 5: CIFAR-10, ResNet-20": (
        Setting(samples=50_000, B=128, I=8, nbytes=272_474 * 4.0, alpha=1e-4, beta=1 / 0.3e9), 4, 40.0, 512,
    ),
    "figure 9: DIV2K, EDSR": (
        Setting(samples=16_000, B=16, I=4, nbytes=1_370_000 * 4.0, alpha=1e-4, beta=1 / 0.3e9),
        8, 2000.0, 128,
    ),
}  # fmt: skip
"""Setting, P, seconds that one process computes in an epoch, and batch size of synchronous SGD.

α and β are our guess for one core of a KNL node that drives MPI with a thread of its own, with one message
per model.
"""


def sgp_rows() -> list[dict[str, Any]]:
    step = {name: np.array(hours, float) * 3600 / STEPS for name, hours in HOURS.items()}
    compute = float(step["1-OSGP"][AT_16])
    beta = float(step["SGP"][AT_16] - compute - LATENCY) / RESNET50
    model = {
        "AR-SGD": allreduce_step(compute, RESNET50, NODES, LATENCY, beta),
        "AR-SGD by recursive doubling": gossip_step(compute, RESNET50, np.log2(NODES), LATENCY, beta),
        "D-PSGD": gossip_step(compute, RESNET50, np.full(4, 2), LATENCY, beta),
        "SGP": gossip_step(compute, RESNET50, np.ones(4), LATENCY, beta),
        "1-OSGP": overlap_step(compute, RESNET50, np.ones(4), LATENCY, beta),
    }
    print(f"computing takes {compute:.3f} s per step; {8e-9 / beta:.1f} Gb/s of 10 reach a node's messages")
    return [
        {
            "figure": "SGP, table 1", "method": name, "nodes": int(n), "hours": float(seconds * steps / 3600),
            "paper": HOURS[name.split(" by ")[0]][i],
        }
        for name, of_nodes in model.items()
        for i, (n, seconds, steps) in enumerate(zip(NODES, of_nodes, STEPS, strict=True))
    ]  # fmt: skip


def local_rows(figure: str) -> list[dict[str, Any]]:
    """Return the speed-up over one process; with fewer processes than groups the training is synchronous."""
    s, P, alone, batch = FIGURES[figure]
    together = Setting(s.samples, batch, s.I, s.nbytes, s.alpha, s.beta)
    K = np.maximum(PROCESSES // P, 1)
    sync = synchronous_epoch(together, PROCESSES)
    few = PROCESSES < P
    communication = {
        "synchronous": sync,
        "allreduce-based": np.where(few, sync, allreduce_epoch(s, P, K)),
        "hierarchical": np.where(few, sync, hierarchical_epoch(s, P, K)),
    }
    return [
        {"figure": figure, "method": name, "processes": int(N), "communication_seconds": float(seconds),
         "speedup": float(alone / (alone / N + seconds))}
        for name, of_processes in communication.items()
        for N, seconds in zip(PROCESSES, of_processes, strict=True)
    ]  # fmt: skip


def goals(rows: list[dict[str, Any]]) -> list[Goal]:
    """Return the goals: each column of SGP's table is reproduced within a quarter.

    The paper's allreduce, unlike the model's, did not send the least bytes.
    """
    known = [row for row in rows if row.get("paper")]
    off = {row["method"]: [] for row in known}
    for row in known:
        off[row["method"]].append(abs(row["hours"] / row["paper"] - 1))
    return [Goal(f"{name}: worst error of the hours", max(errors), 0.25) for name, errors in off.items()]


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    with rc_context(STYLE):
        figure = Figure(figsize=(9, 4.6), layout="constrained", dpi=120)
        _draw(list(figure.subplots(1, 3)), rows)
        save(figure, file)


def _draw(axes: list[Axes], rows: list[dict[str, Any]]) -> None:
    sgp, *figures = axes
    for i, name in enumerate(dict.fromkeys(row["method"] for row in rows if "nodes" in row)):
        own = [row for row in rows if row["method"] == name]
        sgp.plot([row["nodes"] for row in own], [row["hours"] for row in own], "-", color=f"C{i}", label=name)
        if name in HOURS:
            there = [row for row in own if row["paper"]]
            sgp.plot([row["nodes"] for row in there], [row["paper"] for row in there], "o", color=f"C{i}")
    sgp.plot([], [], "ko", label="the paper")
    sgp.set(title="SGP, table 1", xlabel="nodes", ylabel="hours of 90 epochs")
    sgp.set(xscale="log", yscale="log", xticks=NODES, xticklabels=NODES, yticks=[2, 4, 8, 16])
    sgp.set_yticks([2, 4, 8, 16], ["2", "4", "8", "16"])
    for panel, name in zip(figures, FIGURES, strict=True):
        panel.plot(PROCESSES, PROCESSES, color="0.6", linewidth=1, label="linear")
        for method, (style, width) in LOOKS.items():
            own = [row for row in rows if row["figure"] == name and row["method"] == method]
            processes, speedups = [r["processes"] for r in own], [r["speedup"] for r in own]
            panel.plot(processes, speedups, style, lw=width, label=method)
        panel.set(
            title=name.replace(": ", "\n"), xlabel="processes", ylabel="speed-up", xscale="log", yscale="log"
        )
        panel.set_xticks(PROCESSES[::2], [str(N) for N in PROCESSES[::2]])
        panel.set_yticks(PROCESSES, [str(N) for N in PROCESSES])
    for panel in axes:
        panel.minorticks_off()
        panel.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.2))


def main() -> None:
    parser = argparse.ArgumentParser(description="The papers' scaling as their cost models predict it.")
    parser.add_argument("--quick", action="store_true", help="changes nothing: the benchmark takes no time")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    given = parser.parse_args()
    run = Run(timed=False)
    hours = sgp_rows()
    head = ["method", "nodes", "hours", "the paper's", "off by"]
    print_table(
        (
            [r["method"], r["nodes"], f"{r['hours']:.1f}", r["paper"] or "",
             f"{r['hours'] / r['paper'] - 1:+.0%}" if r["paper"] else ""]
            for r in hours
        ), head,
    )  # fmt: skip
    speedups = [row for figure in FIGURES for row in local_rows(figure)]
    for figure in FIGURES:
        print(f"\n{figure}: speed-up over one process")
        by_method = {r["method"]: [] for r in speedups}
        for r in speedups:
            if r["figure"] == figure:
                by_method[r["method"]].append(f"{r['speedup']:.1f}")
        print_table(
            ([name, *values] for name, values in by_method.items()), ["processes", *map(str, PROCESSES)]
        )
    rows = hours + speedups
    if given.plot:
        draw(rows, given.plot)
    run.conclude(rows, goals(rows), given.json)


if __name__ == "__main__":
    main()
