"""Sparse gradient reduction on hosts with slow links: seconds per step and part, sparse and dense.

    python benchmarks/sparse_exchange.py [--hosts 4] [--rate 100] [--density 0.01] [--json FILE] [--plot FILE]

Dense SGD, Top-k, CLT-k and DEFT are compared. Each host has one rank, and all ranks form one group. They
train ResNet-18 with a batch of 2 per rank, by plain SGD with momentum. The hosts are network namespaces,
which need root and share this machine's cores. Contestants take turns, one block of steps each. Each ratio
compares neighboring blocks and takes the slowest rank. The parts of a step are

- "compute": a step without any of the others,
- "select", "encode" and "apply": as the gradient reduction records them, for the slowest rank,
- "share": DEFT's planning and broadcast, for rank 0 with its waiting,
- "indices", "values", "grad_reduce" and "param_gather": their messages, with the waiting for late ranks.

"link" is the number of bytes sent over the link's rate; no reduction can take less time.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from harness import Goal, Run, print_table
from harness.hosts import on_hosts, shaped_hosts
from hpcsgd.files.pictures import (
    AMBER,
    BLUE,
    BROWN,
    GREEN,
    GREY,
    INDIGO,
    ORANGE,
    PINK,
    SKY,
    STYLE,
    save,
)

PARTS = {
    "compute": GREY,
    "share": PINK,
    "select": ORANGE,
    "encode": AMBER,
    "indices": SKY,
    "values": BLUE,
    "grad_reduce": BROWN,
    "param_gather": INDIGO,
    "apply": GREEN,
}
DENSE, DEFT = "dense", "DEFT"
RIVALS = (DENSE, "Top-k", "CLT-k")


def measured(given: argparse.Namespace, rounds: int, steps: int) -> list[dict[str, Any]]:
    hosts = shaped_hosts(given.hosts, f"{given.rate}mbit", "32kb")
    with tempfile.TemporaryDirectory() as folder, hosts as name:
        out = Path(folder) / "rows.json"
        arguments = ["--out", out, "--rounds", rounds, "--steps", steps, "--density", given.density]
        script = Path(__file__).with_suffix("") / "rank.py"
        on_hosts(name, given.hosts, script, list(map(str, arguments)), timeout=3600)
        return json.loads(out.read_text())


def with_limits(rows: list[dict[str, Any]], bytes_per_s: float) -> list[dict[str, Any]]:
    for row in rows:
        row["link_seconds"] = row["bytes_a_step"] / bytes_per_s
    return rows


def goals(rows: Iterable[dict[str, Any]]) -> list[Goal]:
    by_name = {row["who"]: row for row in rows}
    return [
        Goal(f"step of DEFT over that of {rival}", by_name[rival]["deft_over"]["median"], 1)
        for rival in RIVALS
    ]


HEAD = ["who", "ms/step", "DEFT over it", "density", "sent MB", "link ms", "share", "select", "encode"]
HEAD += ["indices", "values", "grad_reduce", "param_gather", "apply"]


def cells(row: dict[str, Any]) -> list[object]:
    over = row["deft_over"]
    parts = [f"{1e3 * row['parts'].get(name, 0):.1f}" if name in row["parts"] else "" for name in HEAD[6:]]
    return [
        row["who"], f"{1e3 * row['seconds_a_step']['median']:.0f}",
        f"{over['median']:.3f} ({over['low']:.3f}–{over['high']:.3f})",
        f"{row['density']:.4f}" if row["density"] else "", f"{row['bytes_a_step'] / 1e6:.2f}",
        f"{1e3 * row['link_seconds']:.0f}", *parts,
    ]  # fmt: skip


def draw(rows: Sequence[dict[str, Any]], title: str, target: Path) -> None:
    """Draw the parts of a step; dense is so much slower that it has a panel of its own."""
    with rc_context(STYLE):
        figure = Figure(figsize=(9, 4.8), dpi=120, layout="constrained")
        _draw(figure, rows)
        figure.suptitle(title, x=0.01, ha="left", fontsize=12)
        save(figure, target)


def _draw(figure: Figure, rows: Sequence[dict[str, Any]]) -> None:
    panels = ([r for r in rows if r["density"] is None], [r for r in rows if r["density"] is not None])
    grid = figure.add_gridspec(1, 2, width_ratios=[len(panel) for panel in panels])
    for place, panel in enumerate(panels):
        axes = figure.add_subplot(grid[place])
        bottom = [0.0] * len(panel)
        for part, colour in PARTS.items():
            heights = [1e3 * row["parts"].get(part, 0.0) for row in panel]
            if any(heights):
                axes.bar([r["who"] for r in panel], heights, bottom=bottom, color=colour, label=part)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        axes.plot(
            [r["who"] for r in panel], [1e3 * r["seconds_a_step"]["median"] for r in panel], "k_",
            markersize=22, label="whole step",
        )  # fmt: skip
        axes.grid(visible=False, axis="x")
    shown = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        shown |= dict(zip(labels, handles, strict=True))
    figure.axes[0].set_ylabel("ms per step")
    figure.legend(shown.values(), shown, loc="outside lower center", ncols=5, fontsize="small")


def main() -> None:
    parser = argparse.ArgumentParser(description="Sparse gradient reductions on slow links.")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", type=int, default=100, help="Mbit/s of each host's link")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--quick", action="store_true", help="check within a minute that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    given = parser.parse_args()
    run = Run()
    rows = measured(given, *((1, 1) if given.quick else (9, 3)))
    rows = with_limits(rows, given.rate * 1e6 / 8)
    print_table(map(cells, rows), HEAD)
    run.conclude(rows, goals(rows), given.json, {"hosts": given.hosts, "mbit_per_s": given.rate})
    if given.plot:
        title = f"ResNet-18 on {given.hosts} hosts, {given.rate} Mbit/s, density {given.density:g}"
        draw(rows, title, given.plot)


if __name__ == "__main__":
    main()
