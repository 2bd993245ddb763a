"""Figures of EnsembleSync (Xie and Yasunaga), compared with ours."""

from __future__ import annotations

from itertools import accumulate
from statistics import mean, median

from ensemble.reallocation import DEAD_AT, SLOW_FROM, SLOW_TO
from ensemble.speed import MINUTES, NOISE
from harness import Goal
from papers.artifact import Beside, Row
from papers.panels import Panel

ACCURACY = {"sync SGD": 83.19, "async SGD": 82.96, "EnsembleSync": 84.29}
"""Accuracy in %, from figure 2. The minutes of figure 2 are in benchmarks/ensemble/speed.py."""
TIMEOUT = 30.0
"""Seconds after which a dead worker is left out (section 4.3)."""
BUDGET = 256
"""Samples of both workers together in one pass."""


def timed(rows: list[Row]) -> dict[str, float]:
    """Return the seconds per epoch of each contestant."""
    return {row["who"]: row["seconds_a_step"]["median"] * row["steps_an_epoch"]
            for row in rows if "seconds_a_step" in row}  # fmt: skip


def speeds(rows: list[Row]) -> dict[str, float]:
    """Return how many times as fast as sync SGD each contestant is: the median of the rounds' ratios."""
    return {row["who"]: row["speed_over_sync"]["median"] for row in rows if "speed_over_sync" in row}


def figure_2(rows: list[Row]) -> Beside:
    epoch = timed(rows)
    score = {who: mean(100 * row["accuracy"][-1] for row in rows if row["who"] == who and "accuracy" in row)
             for who in {row["who"] for row in rows if "accuracy" in row}}  # fmt: skip
    both = [who for who in MINUTES if who in score]
    speed = speeds(rows)
    return Beside(
        ["who", "s an epoch", "accuracy %", "the paper: minutes", "accuracy %"],
        [[who, f"{epoch[who]:.1f}", f"{score[who]:.1f}" if who in score else "", MINUTES.get(who, ""),
          ACCURACY.get(who, "")] for who in epoch if who != "compute only"],
        f"{speed['EnsembleSync']:.2f} times as fast; {', '.join(f'{score[who]:.1f}' for who in both)} % "
        f"({', '.join(both)})",
        f"{MINUTES['sync SGD'] / MINUTES['EnsembleSync']:.2f} times as fast; 83.19, 82.96, 84.29 %",
        [Goal("seconds of EnsembleSync over sync SGD", 1 / speed["EnsembleSync"], 1 / 6.6),
         Goal("seconds of EnsembleSync over async SGD", epoch["EnsembleSync"] / epoch["async SGD"], 1 / 6),
         Goal("points of EnsembleSync behind sync SGD", score["sync SGD"] - score["EnsembleSync"], NOISE)],
    )  # fmt: skip


def figure_3(rows: list[Row]) -> Beside:
    epoch, speed = timed(rows), speeds(rows)
    return Beside(
        ["who", "our seconds an epoch", "the paper's"],
        [[who, f"{epoch[who]:.1f}", f"{60 * minutes / 100:.1f}"] for who, minutes in MINUTES.items()],
        ", ".join(f"{who} {epoch[who]:.0f} s an epoch" for who in MINUTES),
        ", ".join(f"{who} {60 * minutes / 100:.0f} s" for who, minutes in MINUTES.items()) + " an epoch",
        [Goal("seconds of EnsembleSync over sync SGD", 1 / speed["EnsembleSync"], 1 / 6.6),
         Goal("seconds of async over sync SGD", 1 / speed["async SGD"], 1)],
    )  # fmt: skip


def epoch_panels(rows: list[Row]) -> list[Panel]:
    epochs = list(range(11))
    ours = {who: ([s * e for e in epochs], epochs) for who, s in timed(rows).items() if who in MINUTES}
    papers = {who: ([0.6 * m * e for e in epochs], epochs) for who, m in MINUTES.items()}
    return [Panel("", "seconds", "epochs done", ours), Panel("the paper", "seconds", "epochs done", papers)]


def figure_4(rows: list[Row]) -> Beside:
    """Compare the part of figure 4 about EnsembleSync.

    The left and middle parts would need a job that survives the loss of a rank. MPI jobs do not.
    """
    faults = {row["fault"]: row for row in rows if "fault" in row}
    worst = max(row["max_s"] for row in faults.values())
    typical = median(row["median_s"] for row in faults.values())
    return Beside(
        ["fault", "times", "median s to progress", "at most"],
        [[name, row["times"], f"{row['median_s']:.2f}", f"{row['max_s']:.2f}"]
         for name, row in faults.items()],
        f"the others go on after {typical:.2f} s, at most {worst:.2f}, "
        f"in {sum(row['times'] for row in faults.values())} faults",
        "they go on after the timeout of 30 s; sync SGD waits 240 s, async SGD is left with a worker behind",
        [Goal("seconds from any fault to progress, at most", worst, TIMEOUT)],
    )  # fmt: skip


def figure_5(rows: list[Row]) -> Beside:
    units = {row["epoch"]: {int(i): x for i, x in row["units"].items()} for row in rows}
    whole = sum(units[1].values())
    slow = [x for epoch, x in units.items() if 6 <= epoch < 15]
    before, gave = units[1][1] / whole, median(x.get(1, 0) for x in slow) / whole
    last = list(units.values())[-1]
    alone = [x for x in units.values() if set(x) == {1}]
    return Beside(
        ["epoch", "worker 1 has", "worker 2 has"],
        [[epoch, x.get(0, 0), x.get(1, 0)] for epoch, x in units.items() if epoch % 4 == 1],
        f"worker 2 has {before:.0%} of a pass, {gave:.0%} while it is slow, all in {len(alone)} epochs alone",
        "50 %, most of it while it is slow, all of it when worker 1 fails; then back towards the middle",
        [Goal("its share before over that while it is slow", before / gave, 0.9),
         Goal("epochs alone without all units", sum(x[1] != whole for x in alone), 0),
         Goal("share at the end, from one half", abs(last.get(1, 0) / whole - 0.5), 0.15)],
    )  # fmt: skip


def unit_panels(rows: list[Row]) -> list[Panel]:
    done = list(accumulate(row["seconds"] for row in rows))
    epochs = [row["epoch"] for row in rows]
    given = [{int(i): x for i, x in row["units"].items()} for row in rows]
    names = (
        f"group 0, fails in epoch {DEAD_AT}",
        f"group 1, slow in epochs {SLOW_FROM} to {SLOW_TO - 1}",
    )
    units = {name: (epochs, [each.get(i, 0) for each in given]) for i, name in enumerate(names)}
    return [Panel("progress", "seconds since the start", "epochs done", {"both groups": (done, epochs)}),
            Panel("more samples per pass are fewer passes", "epoch", "samples per pass", units)]  # fmt: skip
