"""Predicted and measured seconds per step across hosts with slow links; needs root and iproute2.

    python benchmarks/model_error.py [--quick] [--rates RATE...] [--json FILE] [--plot FILE]

For each link rate ``hpcsgd measure`` times messages twice on four ranks: on two of four hosts, and on one
rank of each of the four. From both files the steps of all methods are predicted for eight ranks on four
hosts, and then measured there, so with other numbers of ranks and other sizes of messages. The time of
computing is measured separately, with all eight ranks computing at once, because they share two cores.
Selsync synchronizes in every step.

The goals are for the median and the worst error, and for two shares. One is the share of measured values
outside the interval that plan states. The other is the share of pairs of methods that are ranked wrong, among
pairs on the same ranks that differ by more than both errors.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from harness import Goal, Run, Spread, print_table
from harness.hosts import on_hosts, shaped_hosts
from hpcsgd.core.layout import bucket_bytes, nbytes
from hpcsgd.core.traffic import ModelLayout
from hpcsgd.cost import machine as machines
from hpcsgd.cost.machine import Machine
from hpcsgd.cost.price import Computed, price
from hpcsgd.engine.plan import StepPlan
from model_error import picture
from model_error.cells import METHODS, RANKS_PER_HOST, SHAPES, WIDTHS, B, network

HOSTS, MEASURED_HOSTS = 4, 2
RATES = ["50mbit", "100mbit"]
"""At higher rates, eight ranks on two cores wait for each other's turns and not for links."""
MEDIAN, WORST, OUTSIDE, WRONG = 0.08, 0.25, 0.1, 0.0
"""Goals for the errors, and for the shares of all steps or pairs."""
SCRIPTS = Path(__file__).with_suffix("")


def measured(rate: str, given: argparse.Namespace) -> tuple[Machine, dict[str, Any]]:
    """Return the machine file of two hosts, and the times of eight ranks on four hosts."""
    folder = given.folder / rate
    file, wide, out = folder / "machine.toml", folder / "wide.toml", folder / "cells.json"
    if not out.exists():
        folder.mkdir(parents=True, exist_ok=True)
        measure(rate, given, file, wide, out)
    return together(machines.load(file), machines.load(wide)), json.loads(out.read_text())


def measure(rate: str, given: argparse.Namespace, file: Path, wide: Path, out: Path) -> None:
    with shaped_hosts(HOSTS, rate, "32kb") as name:
        words = ["--out", str(file), "--seconds", str(given.seconds), "--max-bytes", str(given.max_bytes)]
        on_hosts(name, MEASURED_HOSTS, SCRIPTS / "measure.py", words, 900, RANKS_PER_HOST)
        on_hosts(name, HOSTS, SCRIPTS / "measure.py", ["--out", str(wide), *words[2:]], 900)
        shapes = [f"{P}x{K}" for P, K in given.shapes]
        words = ["--out", str(out), "--models", *given.models, "--shapes", *shapes]
        words += ["--blocks", str(given.blocks), "--rounds", str(given.rounds)]
        on_hosts(name, HOSTS, SCRIPTS / "rank.py", words, 3600, RANKS_PER_HOST)


def together(few: Machine, wide: Machine) -> Machine:
    """Combine the measurements of few hosts with all their ranks, and of all hosts with one rank each."""
    points = [*few.points, *wide.points]
    links = {(link.operation, link.kind, link.ranks): link for link in (*few.link, *wide.link)}
    return replace(few, link=tuple(links.values()), points=tuple(points))


def rows_of(rate: str, machine: Machine, found: dict[str, Any]) -> list[dict[str, Any]]:
    alone = {(row["model"], row["batch"]): row for row in found["computing"]}
    rows: list[dict[str, Any]] = []
    for cell in found["cells"]:
        P, K, model = cell["P"], cell["K"], cell["model"]
        net = network(model)
        bucket = bucket_bytes(nbytes(net.parameters()))
        m = ModelLayout.of(net.named_parameters(), P, K, bucket, ranks_per_host=RANKS_PER_HOST)
        own = alone[model, B // K]
        method = METHODS[cell["method"]]()
        updated = own["update"] / (K if method.grad_reduce.traits.leaves_shards else 1)
        computed = Computed(own["forward"], own["backward"], update=updated)
        cost = price(StepPlan.of(method), m, machine, computed, ranks_per_host=RANKS_PER_HOST, sync_rate=1.0)
        spread = Spread.of(cell["seconds"])
        rows.append(
            {
                "rate": rate, "model": model, "method": cell["method"], "P": P, "K": K,
                "predicted": cost.seconds, "low": cost.low, "high": cost.high,
                "measured": spread.median, "quartiles": [spread.low, spread.high],
                "error": cost.seconds / spread.median - 1, "phases": dict(cost.phases),
                "stood": cell["stood"],
            }
        )  # fmt: skip
    return rows


def wrongly_ranked(rows: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Return how many pairs of methods on the same ranks are predicted in the wrong order, and of how many.

    Only pairs count that differ by more than their errors.
    """
    wrong = pairs = 0
    by_place = itertools.groupby(rows, key=lambda row: (row["rate"], row["model"], row["P"]))
    for _, place in by_place:
        for a, b in itertools.combinations(list(place), 2):
            apart = abs(a["measured"] - b["measured"])
            if apart > abs(a["predicted"] - a["measured"]) + abs(b["predicted"] - b["measured"]):
                pairs += 1
                wrong += (a["measured"] < b["measured"]) != (a["predicted"] < b["predicted"])
    return wrong, pairs


def goals(rows: Sequence[dict[str, Any]]) -> list[Goal]:
    errors = [abs(row["error"]) for row in rows]
    outside = sum(not row["low"] <= row["measured"] <= row["high"] for row in rows) / len(rows)
    wrong, pairs = wrongly_ranked(rows)
    return [
        Goal("median error", median(errors), MEDIAN),
        Goal("worst error", max(errors), WORST),
        Goal("share of steps outside the stated interval", outside, OUTSIDE),
        Goal(f"share of {pairs} pairs of methods ranked wrong", wrong / max(pairs, 1), WRONG),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Difference between predicted and measured steps.")
    parser.add_argument("--quick", action="store_true", help="check within a minute that it runs")
    parser.add_argument(
        "--rates", nargs="+", default=RATES, metavar="RATE", help="rate of a host's link, in tc's notation"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot of measured against predicted times")
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="FOLDER",
        help="folder to keep measurements in, and to reuse them from",
    )
    given = parser.parse_args()
    extent: dict[str, Any] = {
        "models": list(WIDTHS), "shapes": SHAPES, "blocks": 1, "rounds": 1,
        "seconds": 90.0, "max_bytes": 8_000_000,
    }  # fmt: skip
    if given.quick:
        extent |= {
            "rates": given.rates[-1:],
            "models": ["0.6 M"],
            "shapes": [(4, 2)],
            "blocks": 1,
            "rounds": 1,
        }
        extent |= {"seconds": 10.0, "max_bytes": 2_000_000}
    vars(given).update(extent)
    with tempfile.TemporaryDirectory() as folder:
        given.folder = given.folder or Path(folder)
        conclude(given)


def conclude(given: argparse.Namespace) -> None:
    run = Run()
    rows = [row for rate in given.rates for row in rows_of(rate, *measured(rate, given))]
    head = ["rate", "model", "P × K", "method", "measured s", "predicted s", "(from – to)", "error"]
    print_table((cells_of(row) for row in rows), head)
    if given.plot:
        picture.draw(rows, given.plot)
    run.conclude(rows, goals(rows), given.json)


def cells_of(row: dict[str, Any]) -> list[object]:
    interval = f"({row['low']:.3f} – {row['high']:.3f})"
    numbers = [f"{row['measured']:.3f}", f"{row['predicted']:.3f}", interval, f"{row['error']:+.0%}"]
    return [row["rate"], row["model"], f"{row['P']} × {row['K']}", row["method"], *numbers]


if __name__ == "__main__":
    main()
