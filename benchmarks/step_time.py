"""Time steps on four hosts of two ranks with slow links; this needs root and iproute2.

    python benchmarks/step_time.py [--quick] [--who NAME …] [--json FILE] [--plot FILE]

It takes a quarter of an hour; --rates, --models, --kinds and --keep split it into parts.

The contestants are our methods with default options, and these over gloo:

- DistributedDataParallel with several bucket sizes, of which the fastest counts;
- DistributedDataParallel with PowerSGD's hook;
- PeriodicModelAverager;
- torchft's LocalSGD and DiLoCo, if it is installed. Here each rank is a replica group, so that ranks of a
  host share no gradients.

Computing is either emulated or real. Emulated computing sleeps layer by layer, one third of the time in the
forward pass and two thirds in the backward pass. Real computing runs eight ranks on the cores of the machine.

The columns are:

- exposed: seconds by which a step takes longer than on ranks that do not communicate;
- communication: seconds of a step without computing, behind which nothing can be hidden, minus those of ranks
  that do not communicate;
- hidden: the part of communication that is not exposed;
- MB a host: the bytes that leave the interface of a host;
- bound: the bytes that a host has to send per synchronization, 2·(P−1)/P·M numbers of 4 bytes, over the rate
  of its link.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from harness import Goal, Run, Spread, print_table, ratios
from harness.hosts import on_hosts, shaped_hosts
from step_time import picture
from step_time.contestants import ALONE, DDP, ENTRIES
from step_time.networks import KINDS, LAYERS, WIDTH
from step_time.settings import HOSTS, QUICK, RANKS_PER_HOST, RATES, SETTINGS, Setting

SYNC, STEP, EXPOSED = 1.10, 0.95, 0.15
"""Goals: a synchronization over the link's bound; a step over DDP's; the exposed part of what can be hidden.

What can be hidden is the smaller of communication and computing.
"""
SEVERAL_STEPS = 1.05
"""Goal: a step of methods that synchronize in the background, over computing alone."""
TIMES_DDP = 6.5
"""Goal: how many times as fast as DDP such methods are at the slowest rate."""
BESIDE = ("delayed", "streaming")
SCRIPT = Path(__file__).with_suffix("") / "rank.py"
Row = dict[str, Any]


def measured(rate: str, settings: Sequence[Setting], who: Sequence[str]) -> tuple[list[Row], list[Row]]:
    """Return the rows of steps and of synchronizations at one rate."""
    with tempfile.TemporaryDirectory() as folder, shaped_hosts(HOSTS, rate) as name:
        out = Path(folder) / "rows.json"
        words = ["--out", str(out), "--settings", json.dumps([asdict(each) for each in settings])]
        words += ["--groups", str(HOSTS), "--who", *who]
        on_hosts(name, HOSTS, SCRIPT, words, 1800, RANKS_PER_HOST)
        found = json.loads(out.read_text())
    steps, syncs = ([{"rate": rate, **row} for row in found[key]] for key in ("steps", "syncs"))
    return steps, [{**row, "bound": bound(row)} for row in syncs]


def bound(row: Row) -> float:
    """Return the seconds that the link of a host needs for one synchronization."""
    return 2 * (HOSTS - 1) / HOSTS * 4 * LAYERS[row["model"]] * WIDTH**2 * 8 / RATES[row["rate"]]


def belongs(row: Row, setting: Setting) -> bool:
    own = (setting.rate, setting.model, setting.kind)
    return (row["rate"], row["model"], row.get("kind", "emulated")) == own


def judged_steps(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with the quantities that compare all rows of a setting."""
    return [judged(row, [each for each in rows if place(each) == place(row)], rows) for row in rows]


def place(row: Row) -> tuple[str, str, str]:
    return row["rate"], row["model"], row["kind"]


def judged(row: Row, same: Sequence[Row], rows: Iterable[Row]) -> Row:
    alone = next(each for each in same if each["who"] == ALONE)
    exposed = Spread.of([a - b for a, b in zip(row["seconds"], alone["seconds"], strict=True)])
    more: Row = {"compute": median(alone["seconds"]), "exposed": asdict(exposed)}
    rivals = [each for each in same if each["who"].startswith(DDP)]
    if rivals:
        best = min(rivals, key=lambda each: median(each["seconds"]))
        more |= {"against": best["who"], "ratio": asdict(ratios(row["seconds"], best["seconds"]))}
    bare = {each["who"]: each["bare"] for each in rows if each["bare"] and place(each)[:2] == place(row)[:2]}
    if row["who"] in bare:
        communication = max(median(bare[row["who"]]) - median(bare[ALONE]), 0.0)
        more |= {"communication": communication, "hidden": max(communication - exposed.median, 0.0)}
    return {**row, **more}


def goals(steps: Sequence[Row], syncs: Sequence[Row]) -> list[Goal]:
    found = []
    for row in syncs:
        if row["what"] == "sync":
            name = f"{row['rate']}, {row['model']}: a synchronization over the link's bound"
            found.append(Goal(name, median(row["seconds"]) / row["bound"], SYNC))
    for row in steps:
        name = f"{row['rate']}, {row['model']}, {row['kind']}: {row['who']}"
        if row["who"] == "bsp" and "ratio" in row:
            found.append(Goal(f"{name} over {row['against']}", row["ratio"]["median"], STEP))
        if row["who"] == "bsp" and row["kind"] == "emulated":
            share = row["exposed"]["median"] / min(row["communication"], row["compute"])
            found.append(Goal(f"{name}, exposed of what could be hidden", share, EXPOSED))
        if row["who"].startswith(BESIDE) and row["kind"] == "emulated":
            over = median(row["seconds"]) / row["compute"]
            found.append(Goal(f"{name} over computing", over, SEVERAL_STEPS))
            if RATES[row["rate"]] == min(RATES.values()) and "ratio" in row:
                found.append(Goal(f"{name} over {row['against']}", row["ratio"]["median"], 1 / TIMES_DDP))
    return found


def step_cells(row: Row) -> list[object]:
    exposed = Spread(**row["exposed"]).median
    ratio = Spread(**row["ratio"]) if "ratio" in row else ""
    communication, hidden = (f"{row[key]:.3f}" if key in row else "" for key in ("communication", "hidden"))
    numbers = [Spread.of(row["seconds"]), f"{exposed:.3f}", hidden, communication, f"{row['sent'] / 1e6:.2f}"]
    return [*place(row), row["who"], *numbers, f"{row['sent'] * 8 / RATES[row['rate']]:.3f}", ratio]


def sync_cells(row: Row) -> list[object]:
    seconds = Spread.of(row["seconds"])
    numbers = [f"{row['bound']:.3f}", f"{seconds.median / row['bound']:.2f}", f"{row['sent'] / 1e6:.1f}"]
    return [row["rate"], row["model"], row["what"], seconds, *numbers]


HEAD = ["rate", "model", "compute", "who", "s/step (quartiles)", "exposed", "hidden", "communication"]
HEAD += ["MB a host", "÷ rate", "over the best DDP"]
SYNC_HEAD = ["rate", "model", "what", "seconds (quartiles)", "bound", "over it", "MB a host"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Time steps on hosts with slow links.")
    parser.add_argument("--quick", action="store_true", help="run for a minute, only to check that it works")
    parser.add_argument("--who", nargs="+", choices=list(ENTRIES), default=list(ENTRIES), metavar="NAME")
    parser.add_argument("--rates", nargs="+", choices=list(RATES), default=list(RATES))
    parser.add_argument("--models", nargs="+", choices=list(LAYERS), default=list(LAYERS))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--keep", type=Path, metavar="FILE", help="keep the other rows of this result")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a picture of the parts of a step")
    given = parser.parse_args()
    who = list(dict.fromkeys([ALONE, *given.who]))
    chosen = [
        each
        for each in (QUICK if given.quick else SETTINGS)
        if each.rate in given.rates and each.model in given.models and each.kind in given.kinds
    ]
    run = Run()
    kept = [row for row in run.kept(given.keep) if not any(belongs(row, each) for each in chosen)]
    steps = [row for row in kept if "who" in row]
    syncs = [row for row in kept if "what" in row]
    for rate in given.rates:
        if settings := [each for each in chosen if each.rate == rate]:
            more, more_syncs = measured(rate, settings, who)
            steps, syncs = steps + more, syncs + more_syncs
    steps = judged_steps(steps)
    print_table(map(step_cells, steps), HEAD)
    print()
    print_table(map(sync_cells, syncs), SYNC_HEAD)
    if given.plot:
        picture.draw(steps, given.plot)
    run.conclude([*steps, *syncs], goals(steps, syncs), given.json)


if __name__ == "__main__":
    main()
