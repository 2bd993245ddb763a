"""Which trainings `time_to_quality.py` needs, and which results follow from its rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Any

from harness import Goal, Spread
from harness.curve import reached
from time_to_quality.contestants import CONTESTANTS, DDP, OURS, PEERS
from time_to_quality.tasks import Task

UNSHAPED = "unshaped"
"""The rate of one host without links."""
TUNING = 0
"""The seed of the trials, which choose the learning rate."""
LENGTHS = (1.0, 1.5, 2.0)
"""Factors of the number of steps. A longer training follows where the shorter one ends behind DDP."""
GOALS = {"100mbit": 0.25, "1gbit": 0.9}
"""By rate: the goal for the time to DDP's quality of our best method, over DDP's time."""
STEP = 1.03
"""The goal for the step time of `bsp` over that of DDP, on the unshaped host."""
Row = dict[str, Any]
Due = list[Row]


@dataclass(frozen=True)
class Part:
    """The part of the benchmark that was requested."""

    who: Sequence[str]
    rates: Sequence[str]
    seeds: Sequence[int]
    lengths: Sequence[float] = LENGTHS


def launches(task: Task, name: str, rows: Sequence[Row], part: Part) -> Iterator[tuple[str, Due]]:
    """Yield the rate and the trainings of each launch.

    The caller must add the rows of a launch to `rows` before it requests the next one.
    """
    if len(task.lrs) > 1:
        trials = [training(task, each, TUNING, lr, 1.0) for each in part.who for lr in task.lrs]
        yield from _missing(name, UNSHAPED, trials, rows)
    for rate in part.rates:
        for length in part.lengths:
            behind = [each for each in part.who if length == 1.0 or _is_behind(rows, name, rate, each)]
            due = [
                training(task, each, seed, best_lr(task, name, rows, each), length)
                for seed in part.seeds
                for each in behind
            ]
            yield from _missing(name, rate, due, rows)


def training(task: Task, who: str, seed: int, lr: float, length: float) -> Row:
    return {"who": who, "seed": seed, "lr": lr, "length": length, "steps": round(task.steps * length)}


def _missing(task: str, rate: str, due: Due, rows: Sequence[Row]) -> Iterator[tuple[str, Due]]:
    there = [
        {key: row[key] for key in ("who", "seed", "lr", "length", "steps")} for row in of(rows, task, rate)
    ]
    if missing := [each for each in due if each not in there]:
        yield rate, missing


def of(rows: Sequence[Row], task: str, rate: str) -> list[Row]:
    return [row for row in rows if (row["task"], row["rate"]) == (task, rate)]


def best_lr(task: Task, name: str, rows: Sequence[Row], who: str) -> float:
    """Return the learning rate with the best score in the trials."""
    if len(task.lrs) == 1:
        return task.lrs[0]
    trials = [row for row in of(rows, name, UNSHAPED) if (row["who"], row["seed"]) == (who, TUNING)]
    return min(trials, key=lambda row: row["scores"][-1])["lr"]


def finals(rows: Sequence[Row], task: str, rate: str, who: str, length: float = 1.0) -> dict[int, Row]:
    """Return the rows by seed, without the trials."""
    return {
        row["seed"]: row
        for row in of(rows, task, rate)
        if (row["who"], row["length"]) == (who, length) and row["seed"] != TUNING
    }


def target(rows: Sequence[Row], task: str, rate: str) -> float | None:
    """Return the score to reach: DDP's mean plus its standard deviation over the seeds."""
    scores = [row["scores"][-1] for row in finals(rows, task, rate, DDP).values()]
    if not scores:
        return None
    return fmean(scores) + (stdev(scores) if len(scores) > 1 else 0.0)


def _is_behind(rows: Sequence[Row], task: str, rate: str, who: str) -> bool:
    return target(rows, task, rate) is not None and not times(rows, task, rate, who)


def times(rows: Sequence[Row], task: str, rate: str, who: str) -> dict[int, float]:
    """Return the seconds to the target by seed, of the shortest training that reaches it with every seed.

    The result is empty if there is no such training.
    """
    score = target(rows, task, rate)
    for length in LENGTHS:
        mine = finals(rows, task, rate, who, length)
        found = {} if score is None else {seed: _reached(row, score) for seed, row in mine.items()}
        if found and None not in found.values():
            return {seed: seconds for seed, seconds in found.items() if seconds is not None}
    return {}


def _reached(row: Row, score: float) -> float | None:
    return reached(row["seconds"], row["scores"], score)


def over_ddp(rows: Sequence[Row], task: str, rate: str, who: str) -> Spread | None:
    """Return the times to the target over those of DDP with the same seeds.

    The result is None if the target is not reached.
    """
    mine, theirs = times(rows, task, rate, who), times(rows, task, rate, DDP)
    ratios = [mine[seed] / theirs[seed] for seed in sorted(mine.keys() & theirs.keys())]
    return Spread.of(ratios) if ratios else None


HEAD = ["task", "rate", "who", "lr", "steps", "final score", "seconds", "MB a host", "s to DDP's", "over DDP"]


def lines(rows: Sequence[Row]) -> Iterator[list[object]]:
    """Yield the lines of the table."""
    for task, rate in dict.fromkeys((row["task"], row["rate"]) for row in rows):
        for who in CONTESTANTS:
            for length in LENGTHS:
                if mine := finals(rows, task, rate, who, length):
                    yield [task, rate, who, *_cells(rows, mine)]


def _cells(rows: Sequence[Row], mine: dict[int, Row]) -> list[object]:
    first = next(iter(mine.values()))
    task, rate, who = first["task"], first["rate"], first["who"]
    seconds, sent = (Spread.of([row[key][-1] for row in mine.values()]) for key in ("seconds", "megabytes"))
    scores = [row["scores"][-1] for row in mine.values()]
    score = f"{fmean(scores):.3f}" + (f" ± {stdev(scores):.3f}" if len(scores) > 1 else "")
    aim = target(rows, task, rate)
    took = [] if aim is None else [_reached(row, aim) for row in mine.values()]
    reach = f"{median(t for t in took if t is not None):.1f}" if took and None not in took else "never"
    over = over_ddp(rows, task, rate, who) if reach != "never" else None
    return [
        first["lr"],
        first["steps"],
        score,
        f"{seconds.median:.1f}",
        f"{sent.median:.1f}",
        reach,
        over or "",
    ]


def goals(rows: Sequence[Row]) -> list[Goal]:
    found: list[Goal] = []
    for task, rate in dict.fromkeys((row["task"], row["rate"]) for row in rows):
        ratios = {who: over_ddp(rows, task, rate, who) for who in CONTESTANTS}
        reach = {who: each.median for who, each in ratios.items() if each is not None}
        ours, peers = ({who: reach[who] for who in names if who in reach} for names in (OURS, PEERS))
        if rate == UNSHAPED:
            found += _steps(rows, task)
        elif ours and peers:
            best, peer = min(ours, key=ours.__getitem__), min(peers, key=peers.__getitem__)
            place = f"{task}, {rate}: {best}, time to DDP's quality"
            if rate in GOALS:
                found.append(Goal(f"{place} over DDP's", ours[best], GOALS[rate]))
            found.append(Goal(f"{place} over that of {peer}", ours[best] / peers[peer], 1.0))
    return found


def _steps(rows: Sequence[Row], task: str) -> list[Goal]:
    mine, theirs = (finals(rows, task, UNSHAPED, who) for who in ("bsp", DDP))
    both = sorted(mine.keys() & theirs.keys())
    over = [mine[seed]["seconds"][-1] / theirs[seed]["seconds"][-1] for seed in both]
    return [Goal(f"{task}, {UNSHAPED}: bsp, seconds over DDP's", median(over), STEP)] if over else []
