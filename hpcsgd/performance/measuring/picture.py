"""Draw the measured points of a machine file, its fitted lines and their ratio, by operation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpcsgd.cost.collectives import SHAPES
from hpcsgd.cost.machine import Machine
from hpcsgd.files.pictures import save
from hpcsgd.performance.measuring.summary_text import link_text


def draw(machine: Machine, target: Path) -> None:
    """Draw `machine` into the file `target`: seconds against bytes, and below fitted / measured seconds."""
    from matplotlib.figure import Figure

    operations = [name for name in SHAPES if any(p.operation == name for p in machine.points)]
    figure = Figure(figsize=(3.1 * len(operations) + 0.5, 6.6), dpi=110, layout="constrained")
    axes: Any = figure.subplots(
        2, len(operations), sharex=True, sharey="row", squeeze=False, height_ratios=[2, 1]
    )
    ways = list(dict.fromkeys(p.link_class for p in machine.points))
    for column, operation in enumerate(operations):
        _draw_operation(machine, operation, ways, axes[:, column])
    axes[0, 0].set_ylabel("seconds, of the slowest rank")
    axes[1, 0].set_ylabel("line / measured")
    handles = {link_text(way): axes[0, 0].plot([], [], "o-", color=f"C{i}")[0] for i, way in enumerate(ways)}
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=4, frameon=False)
    about = machine.machine
    figure.suptitle(
        f"{about.hosts} × {about.ranks_per_host} ranks, {about.backend}: "
        "measured (●), without the communication thread (·), and α-β lines",
        x=0.01, ha="left",
    )  # fmt: skip
    save(figure, target)


def _draw_operation(machine: Machine, operation: str, ways: list[Any], axes: Any) -> None:
    above, below = axes
    for points in (p for p in machine.points if p.operation == operation):
        color = f"C{ways.index(points.link_class)}"
        lines = [machine.seconds(operation, n, points.link_class) for n in points.bytes]
        above.plot(points.bytes, lines, "-", color=color, lw=1)
        above.plot(points.bytes, points.seconds, "o", color=color, ms=4)
        above.plot(points.bytes, points.bare_seconds, ".", color=color, ms=3, alpha=0.6)
        ratios = [line / seconds for line, seconds in zip(lines, points.seconds, strict=True)]
        below.plot(points.bytes, ratios, "o-", color=color, ms=3, lw=0.7)
    for link in (link for link in machine.link if link.operation == operation):
        for knee in link.from_bytes[1:]:
            above.axvline(knee, color="0.8", lw=0.8, zorder=0)
    above.set(title=operation, xscale="log", yscale="log")
    below.axhline(1, color="0.5", lw=0.8)
    below.set(xlabel="bytes", yscale="log")
    below.set_yticks([0.25, 0.5, 1, 2, 4], ["¼", "½", "1", "2", "4"])
    below.minorticks_off()
    for each in axes:
        each.grid(alpha=0.25)
