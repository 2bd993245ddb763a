"""Evaluation of the rows of `slow_group.py`: the best trial, and time and loss over those of DiLoCo."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import mean, stdev
from typing import Any

from harness import Goal
from slow_group.contestants import CONTESTANTS, DILOCO, Settings, Training

Row = dict[str, Any]
TUNED = 0
"""The seed of trials; other seeds use the settings that were best in the trials."""
SHARES = (0.25, 0.35, 0.44)
"""Shares of DiLoCo's time that the others are given. They end at the next synchronization."""
MOST = SHARES[-1]
TIME, LOSS = 0.45, 1.0
"""Goals with the largest share: time and loss over those of DiLoCo."""


def is_done(training: Training, rows: Sequence[Row]) -> bool:
    return any(
        Training(**{name: row[name] for name in ("who", "settings", "seed", "share")}) == training
        for row in rows
    )


def shares(who: str) -> Sequence[float]:
    return (1.0,) if CONTESTANTS[who].waits else SHARES


def trials(who: str) -> Iterator[Training]:
    """Yield the trainings that find the best settings of `who`, in the longest time that it is given."""
    for settings in CONTESTANTS[who].trials:
        yield Training(who, settings, TUNED, shares(who)[-1])


def finals(who: str, seeds: Sequence[int], rows: Sequence[Row]) -> Iterator[Training]:
    """Yield the trainings with the best settings."""
    if (settings := best(rows, who)) is not None:
        for seed in seeds:
            for share in shares(who):
                yield Training(who, settings, seed, share)


def best(rows: Sequence[Row], who: str) -> Settings | None:
    tried = [row for row in rows if (row["who"], row["seed"]) == (who, TUNED)]
    return min(tried, key=lambda row: row["held_out_loss"])["settings"] if tried else None


def by_seed(rows: Sequence[Row], who: str, share: float) -> dict[int, Row]:
    settings = best(rows, who)
    return {
        row["seed"]: row
        for row in rows
        if (row["who"], row["share"], row["settings"]) == (who, share, settings) and row["seed"] != TUNED
    }


def ratios(rows: Sequence[Row], who: str, share: float, what: str) -> list[float]:
    """Return `what` over that of DiLoCo, for each seed that both have."""
    mine, theirs = by_seed(rows, who, share), by_seed(rows, DILOCO, 1.0)
    return [mine[seed][what] / theirs[seed][what] for seed in sorted(mine.keys() & theirs.keys())]


def judged(rows: Sequence[Row]) -> tuple[list[list[object]], list[Goal]]:
    """Return the rows of the table, and the goals."""
    lines, goals = list[list[object]](), list[Goal]()
    for who in CONTESTANTS:
        for share in shares(who):
            if not (mine := list(by_seed(rows, who, share).values())):
                continue
            seconds, loss = (ratios(rows, who, share, what) for what in ("seconds", "test_loss"))
            steps = " ".join(
                f"{mean(each):.0f}" for each in zip(*(row["steps"] for row in mine), strict=True)
            )
            settings = ", ".join(f"{name} {value:g}" for name, value in mine[0]["settings"].items())
            late = sum(row["late_steps"] for row in mine) / sum(sum(row["steps"]) for row in mine)
            lines.append([who, len(mine), spread(seconds), spread(loss), steps, f"{late:.2%}", settings])
            if who != DILOCO and share == MOST and loss:
                goals.append(Goal(f"{who}: time over that of DiLoCo", mean(seconds), TIME))
                goals.append(Goal(f"{who}: loss over that of DiLoCo, in this time", mean(loss), LOSS))
    return lines, goals


def spread(values: Sequence[float]) -> str:
    if not values:
        return ""
    error = f" ± {stdev(values) / len(values) ** 0.5:.4f}" if len(values) > 1 else ""
    return f"{mean(values):.4f}{error}"
