"""The link bandwidth from which on plain data parallelism is as fast: seconds per step against the rate.

    python benchmarks/crossover.py [--quick] [--json FILE] [--plot FILE]

The lines are predictions of the cost model, by the formulas of `hpcsgd plan`, for links from 10 Mbit/s to 100
Gbit/s. Only the first panel has points. These are the seconds that `step_time.py` measured on emulated hosts,
whose ranks sleep instead of computing. The other panels show the model alone, for GPUs on which we have not
measured:

- ResNet-50, mixed precision, 16 hosts of four A100: 256 images per GPU and step at 2,500 images per second.
- A GPT of 1.3 billion parameters in bf16 on the same hosts: 32,768 tokens per GPU and step, 6 operations per
  parameter and token, at 45 % of an A100's 312 teraflop/s.

DistributedDataParallel, HSDP and `bsp` send the same bytes between hosts, so they share a line,
"synchronous". `step_time.py` measures how they differ. A group is a host. `hierarchical` and `delayed`
average the models every eight steps. The table shows the rate from which on synchronous training takes at
most 1.1 times as long as computing alone, and at most 1.03 times as long as `hierarchical`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from torch import nn

import hpcsgd
from harness import Goal, Run, print_table
from hpcsgd.core.layout import bucket_bytes
from hpcsgd.core.traffic import ModelLayout
from hpcsgd.cost.links import Link
from hpcsgd.cost.machine import About, Machine
from hpcsgd.cost.price import Computed, price
from hpcsgd.engine.plan import StepPlan
from hpcsgd.files.pictures import STYLE, save
from hpcsgd.models import gpt, resnet50
from step_time.networks import FORWARD, LAYERS, WIDTH
from step_time.settings import COMPUTE, HOSTS, RANKS_PER_HOST
from step_time.settings import RATES as MEASURED_RATES

MEASURED = Path(__file__).parent / "results" / "step_time.json"
RATES = np.logspace(7, 11, 41)
"""Bits per second of a host's link."""
EVERY = 8
ALPHA, INSIDE = 5e-5, 2e-10
"""Latency of a message between hosts in seconds, as over TCP, and seconds per byte inside a host of CPUs."""
NVLINK = 5e-12
"""Seconds per byte inside a host of GPUs: two thirds of the 300 GB/s each way of an A100's NVLink."""
A100, UTILIZATION = 312e12, 0.45
TOKENS, IMAGES, IMAGES_PER_SECOND = 32_768, 256, 2500.0
CLOSE, NEARLY_COMPUTING, WORST = 1.03, 1.1, 0.25
"""`WORST` is the goal for the model's error at measured points."""
SYNCHRONOUS, LOCAL, LATE = "synchronous (DDP, HSDP, bsp)", "hierarchical(8)", "delayed(8)"
METHODS: Mapping[str, Callable[[], hpcsgd.Method]] = {
    SYNCHRONOUS: hpcsgd.bsp,
    LOCAL: lambda: hpcsgd.hierarchical(EVERY),
    LATE: lambda: hpcsgd.delayed(hpcsgd.hierarchical(EVERY), EVERY),
}
LOOKS = {SYNCHRONOUS: ("C0", "-", 2.5), LOCAL: ("C1", "-", 4.0), LATE: ("C2", "--", 2.0)}
"""Color, style and width of each line; on slow links the last two coincide."""
POINTS = {"DDP": SYNCHRONOUS, "bsp": SYNCHRONOUS, LOCAL: LOCAL, LATE: LATE}
"""The line to which each measured contestant belongs."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Panel:
    title: str
    model: Callable[[], nn.Module]
    """Makes the model on torch's meta device, because only shapes and dtypes count."""
    seconds: float
    """Seconds of computing per step; a third of them is the forward pass."""
    hosts: int
    ranks_per_host: int
    inside: float
    """Seconds per byte inside a host."""
    measured: str = ""
    """The model's name in `step_time.json`."""


def layers() -> nn.Module:
    """Return the network of `step_time.py`."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS["6 M"])))


def large_gpt() -> nn.Module:
    return gpt(50_304, width=2048, layers=24, heads=16).to(torch.bfloat16)


def numel(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def panels() -> list[Panel]:
    with torch.device("meta"):
        tokens = 6 * numel(large_gpt()) * TOKENS / (A100 * UTILIZATION)
    return [
        Panel(
            "6 M parameters, 4 emulated hosts of 2 ranks",
            layers,
            COMPUTE,
            HOSTS,
            RANKS_PER_HOST,
            INSIDE,
            "6 M",
        ),
        Panel("ResNet-50, 16 hosts of 4 A100 (model)", resnet50, IMAGES / IMAGES_PER_SECOND, 16, 4, NVLINK),
        Panel("GPT 1.3 B, 16 hosts of 4 A100 (model)", large_gpt, tokens, 16, 4, NVLINK),
    ]


def machine(panel: Panel, rate: float) -> Machine:
    def link(kind: Any, alpha: float, beta: float) -> Link:
        return Link(operation="any", kind=kind, alpha_seconds=(alpha,), beta_seconds_per_byte=(beta,))

    between = 8 / rate
    return Machine(
        machine=About(hosts=panel.hosts, ranks_per_host=panel.ranks_per_host, backend="by hand"),
        link=(
            link("inside", 1e-6, panel.inside),
            link("across", ALPHA, between),
            link("mixed", ALPHA, between),
        ),
    )


def lines(panel: Panel) -> list[Row]:
    """Return the predicted seconds of a step for each method and rate."""
    with torch.device("meta"):
        model = panel.model()
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    m = ModelLayout.of(
        model.named_parameters(), panel.hosts, panel.ranks_per_host, bucket_bytes(nbytes),
        ranks_per_host=panel.ranks_per_host,
    )  # fmt: skip
    computed = Computed(panel.seconds * FORWARD, panel.seconds * (1 - FORWARD))
    return [
        {
            "panel": panel.title, "method": name, "rate": float(rate), "compute": panel.seconds,
            "seconds": price(StepPlan.of(make()), m, machine(panel, rate), computed).seconds,
        }
        for name, make in METHODS.items()
        for rate in RATES
    ]  # fmt: skip


def points(panel: Panel, found: Sequence[Row]) -> list[Row]:
    """Return what was measured for this panel. For DDP, only its fastest bucket size counts."""
    steps: dict[tuple[str, float], float] = {}
    for row in found:
        who = str(row.get("who", "")).partition(" ")[0]
        if (row["model"], row.get("kind")) == (panel.measured, "emulated") and who in POINTS:
            place = who, MEASURED_RATES[row["rate"]]
            steps[place] = min(steps.get(place, math.inf), median(row["seconds"]))
    return [
        {"panel": panel.title, "who": who, "method": POINTS[who], "rate": rate, "seconds": seconds}
        for (who, rate), seconds in steps.items()
    ]


HEAD = ["setting", "computing, s", "≤ 1.1 × computing from", "≤ 1.03 × hierarchical(8) from"]


def cells(panel: Panel, rows: Sequence[Row]) -> list[object]:
    """Return the panel's row of the table."""
    own = [row for row in rows if row["panel"] == panel.title and "who" not in row]
    sync, local = ([row for row in own if row["method"] == name] for name in (SYNCHRONOUS, LOCAL))
    nearly = crossing(sync, [NEARLY_COMPUTING * row["compute"] for row in sync])
    close = crossing(sync, [CLOSE * row["seconds"] for row in local])
    return [panel.title, f"{panel.seconds:.3f}", rate_text(nearly), rate_text(close)]


def crossing(line: Sequence[Row], most: Sequence[float]) -> float:
    """Return the lowest rate from which on the line's seconds are at most `most`, or infinity without one."""
    good = [row["seconds"] <= limit for row, limit in zip(line, most, strict=True)]
    return next((row["rate"] for i, row in enumerate(line) if all(good[i:])), math.inf)


def goals(rows: Sequence[Row]) -> list[Goal]:
    found = []
    for point in (row for row in rows if row.get("who") not in (None, "DDP")):
        own = [row for row in rows if "who" not in row and same_line(row, point)]
        at = float(np.interp(point["rate"], [row["rate"] for row in own], [row["seconds"] for row in own]))
        name = f"{point['who']} at {rate_text(point['rate'])}: the model's error"
        found.append(Goal(name, abs(at / point["seconds"] - 1), WORST))
    return found


def same_line(row: Row, point: Row) -> bool:
    return (row["panel"], row["method"]) == (point["panel"], point["method"])


def rate_text(rate: float) -> str:
    if math.isinf(rate):
        return "none"
    return f"{rate / 1e9:.2g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:.0f} Mbit/s"


def draw(file: Path, rows: Sequence[Row], shown: Sequence[Panel]) -> None:
    """Draw three panels, and the legend in the place of a fourth."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9, 6.6), layout="constrained", dpi=120)
        *all_axes, last = figure.subplots(2, 2).flat
        for panel, axes in zip(shown, all_axes, strict=True):
            _panel(axes, panel, [row for row in rows if row["panel"] == panel.title])
        last.set_axis_off()
        last.legend(*all_axes[0].get_legend_handles_labels(), loc="center")
        save(figure, file)


def _panel(axes: Axes, panel: Panel, rows: Sequence[Row]) -> None:
    axes.axhline(panel.seconds, color="0.3", lw=1.8, ls=":", label="computing alone")
    for name, (color, style, width) in LOOKS.items():
        line = [row for row in rows if row["method"] == name and "who" not in row]
        x, y = ([row[key] for row in line] for key in ("rate", "seconds"))
        axes.plot(x, y, style, color=color, lw=width, label=name)
        for who, marker in zip(POINTS, "xo^s", strict=True):
            if at := [row for row in rows if row.get("who") == who and row["method"] == name]:
                x, y = ([row[key] for row in at] for key in ("rate", "seconds"))
                axes.plot(x, y, marker, color=color, ms=8, mew=1.5, mec="k", label=f"{who}, measured")
    axes.set(xscale="log", yscale="log", title=panel.title.replace(", ", "\n", 1))
    axes.set(xlabel="rate of a host's link, bit/s", ylabel="seconds per step")
    axes.set_xticks([1e7, 1e8, 1e9, 1e10, 1e11], ["10 M", "100 M", "1 G", "10 G", "100 G"])
    axes.xaxis.set_minor_locator(NullLocator())


def main() -> None:
    parser = argparse.ArgumentParser(description="Bandwidth from which on plain data parallelism is as fast.")
    parser.add_argument("--quick", action="store_true", help="changes nothing: the benchmark takes seconds")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    given = parser.parse_args()
    run, shown = Run(timed=False), panels()
    found = run.kept(MEASURED)
    rows = [row for panel in shown for row in (*lines(panel), *points(panel, found))]
    print_table((cells(panel, rows) for panel in shown), HEAD)
    if given.plot:
        draw(given.plot, rows, shown)
    run.conclude(rows, goals(rows), given.json)


if __name__ == "__main__":
    main()
