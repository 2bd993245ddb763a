"""Evaluation of the rows of `bytes_at_quality.py`: the best trial, and the loss in quality for few bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from math import log
from statistics import mean, stdev
from typing import Any

from bytes_at_quality.contestants import (
    BSP,
    CONTESTANTS,
    DILOCO,
    MULOCO,
    SCHEDULED,
    SPARSE,
    SPARSE_SCHEDULED,
    STREAMED,
    STREAMED_SCHEDULED,
    Settings,
)
from bytes_at_quality.training import Setting
from harness import Goal

Row = dict[str, Any]
TUNED = 0
"""The seed of trials; other seeds use the settings that were best in the trials."""
LOSS, NO_WORSE = 1.005, 1.0
ROUNDING = 5e-3
"""Tolerance for bytes: the formula assumes fragments of equal size, and whole blocks in each."""
FEWER = {STREAMED: 400.0, SPARSE: 2000.0, STREAMED_SCHEDULED: 400.0, SPARSE_SCHEDULED: 1000.0}
"""Goals: loss over that of bsp; loss over that of DiLoCo; how many times fewer bytes than bsp."""
BY_SCHEDULE = {4: 1.02, 8: 1.06}
"""Goal by number of groups: loss of DiLoCo with an outer schedule over that of bsp."""


def name(groups: int, who: str, seed: int, settings: Settings) -> tuple[Any, ...]:
    """Return the name of a training."""
    return groups, who, seed, tuple(sorted(settings.items()))


def named(row: Row) -> tuple[Any, ...]:
    return name(row["groups"], row["who"], row["seed"], row["settings"])


def is_of_now(row: Row, setting: Setting) -> bool:
    """Return whether a row is of a training that would be the same today."""
    known = CONTESTANTS.get(row["who"])
    return known is not None and row["settings"] in known.trials and row["setting"] == asdict(setting)


def of(rows: Sequence[Row], who: str, groups: int) -> list[Row]:
    return [row for row in rows if (row["who"], row["groups"]) == (who, groups)]


def best(rows: Sequence[Row], who: str, groups: int) -> Settings | None:
    """Return the best of the settings that were tried, judged by the text held out.

    bsp gives the same with any number of groups, so any of its trials counts.
    """
    tried = [row for row in rows if row["who"] == who and row["seed"] == TUNED]
    trials = [row for row in tried if who == BSP or row["groups"] == groups]
    return min(trials, key=lambda row: row["held_out_loss"])["settings"] if trials else None


def due(
    rows: Sequence[Row], who: str, shapes: Sequence[int], seeds: Sequence[int], trials: int
) -> Iterator[tuple[int, int, Settings]]:
    """Yield what is to be trained, as groups, seed and settings: the trials, and then the best of them."""
    for groups in sorted(shapes):
        if who != BSP or groups == min(shapes):
            for settings in CONTESTANTS[who].trials[:trials]:
                yield groups, TUNED, settings
        chosen = best(rows, who, groups)
        assert chosen is not None
        for seed in seeds:
            yield groups, seed, chosen


def finals(rows: Sequence[Row], who: str, groups: int) -> dict[int, Row]:
    """Return the rows with the best settings, by seed."""
    settings = best(rows, who, groups)
    return {
        row["seed"]: row
        for row in of(rows, who, groups)
        if row["seed"] != TUNED and row["settings"] == settings
    }


def ratios(mine: Mapping[int, Row], theirs: Mapping[int, Row], what: str) -> list[float]:
    """Return the ratios for each seed that both have."""
    return [mine[seed][what] / theirs[seed][what] for seed in sorted(mine.keys() & theirs.keys())]


def judged(rows: Sequence[Row]) -> tuple[list[list[object]], list[Goal]]:
    """Return the rows of the table, and the goals."""
    lines: list[list[object]] = []
    goals: list[Goal] = []
    for groups in sorted({row["groups"] for row in rows}):
        found = {who: finals(rows, who, groups) for who in CONTESTANTS}
        lines += [line(groups, who, mine, found[BSP]) for who, mine in found.items() if mine]
        goals += goals_of(groups, found)
    apart = [abs(row["bytes"] / row["formula"] - 1) for row in rows]
    goals.append(Goal("bytes over those of the formula: the largest difference", max(apart), ROUNDING))
    return lines, goals


def line(groups: int, who: str, mine: Mapping[int, Row], bsp: Mapping[int, Row]) -> list[object]:
    losses = [row["test_loss"] for row in mine.values()]
    over, fewer = ratios(mine, bsp, "test_loss"), ratios(bsp, mine, "bytes")
    error = f" ± {stdev(over) / len(over) ** 0.5:.4f}" if len(over) > 1 else ""
    settings = ", ".join(f"{name} {_text(x)}" for name, x in next(iter(mine.values()))["settings"].items())
    apart, times = (f"{mean(over):.4f}{error}", f"{mean(fewer):.0f}") if over else ("", "")
    megabytes = f"{mean(row['bytes'] for row in mine.values()) / 1e6:.3f}"
    return [groups, who, len(mine), f"{mean(losses) / log(2):.4f}", apart, megabytes, times, settings]


def _text(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def goals_of(groups: int, found: Mapping[str, Mapping[int, Row]]) -> list[Goal]:
    def loss(who: str, against: str, most: float) -> list[Goal]:
        over = ratios(found[who], found[against], "test_loss")
        return (
            [Goal(f"{groups} groups: loss of {who} over that of {against}", mean(over), most)] if over else []
        )

    goals = loss(STREAMED, BSP, LOSS) + loss(SPARSE, DILOCO, NO_WORSE) + loss(MULOCO, DILOCO, NO_WORSE)
    goals += loss(SCHEDULED, BSP, BY_SCHEDULE[groups]) if groups in BY_SCHEDULE else []
    goals += loss(STREAMED_SCHEDULED, SCHEDULED, NO_WORSE) + loss(SPARSE_SCHEDULED, SCHEDULED, NO_WORSE)
    for who, fewer in FEWER.items():
        if part := ratios(found[who], found[BSP], "bytes"):
            goals.append(Goal(f"{groups} groups: bytes of {who} over those of bsp", mean(part), 1 / fewer))
    return goals
