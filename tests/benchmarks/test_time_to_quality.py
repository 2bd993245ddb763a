"""What `time_to_quality.py` trains, and how it judges its rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from time_to_quality.contestants import CONTESTANTS, DDP, OURS, PEERS
from time_to_quality.judging import (
    TUNING,
    UNSHAPED,
    Part,
    best_lr,
    goals,
    launches,
    lines,
    over_ddp,
    target,
    times,
)
from time_to_quality.tasks import TASKS

TASK = TASKS["gpt"]
Row = dict[str, Any]
Scores = Callable[[Row], float]


def row(told: Row, rate: str, score: float, seconds: float = 10.0) -> Row:
    """Return the row of a training whose score falls evenly from 10 to `score`."""
    course = {"at": [1, 2], "seconds": [0.0, seconds], "megabytes": [0.0, 5.0], "scores": [10.0, score]}
    return {"task": "gpt", "rate": rate, **told, **course}


def trained(part: Part, scores: Scores) -> tuple[list[Row], list[tuple[str, list[Row]]]]:
    """Return the rows of all trainings that are due, and the launches that made them."""
    rows: list[Row] = []
    done: list[tuple[str, list[Row]]] = []
    for rate, due in launches(TASK, "gpt", rows, part):
        done.append((rate, due))
        rows += [row(told, rate, scores(told)) for told in due]
    return rows, done


def final(who: str, rate: str, seed: int, score: float, seconds: float = 10.0, length: float = 1.0) -> Row:
    return row({"who": who, "seed": seed, "lr": 1.0, "length": length, "steps": 2}, rate, score, seconds)


def test_everybody_is_either_ours_or_a_peer_and_ddp_is_one():
    assert DDP in PEERS
    assert PEERS.keys().isdisjoint(OURS)
    assert PEERS | OURS == CONTESTANTS


def test_each_is_tried_with_each_learning_rate_and_trains_with_the_best():
    rows, done = trained(Part([DDP, "bsp"], ["1gbit"], [1, 2]), lambda told: abs(told["lr"] - TASK.lrs[1]))
    [(first, trials), (second, finals)] = done
    assert (first, second) == (UNSHAPED, "1gbit")
    assert [(told["who"], told["lr"]) for told in trials] == [
        (w, lr) for w in (DDP, "bsp") for lr in TASK.lrs
    ]
    assert {told["seed"] for told in trials} == {TUNING}
    assert [(told["seed"], told["who"]) for told in finals] == [(1, DDP), (1, "bsp"), (2, DDP), (2, "bsp")]
    assert {told["lr"] for told in finals} == {TASK.lrs[1]} == {best_lr(TASK, "gpt", rows, "bsp")}


def test_who_ends_behind_ddp_trains_longer_and_no_longer_than_it_takes():
    needed = {DDP: 1.0, "bsp": 1.0, "sgp": 1.5, "hierarchical": 2.0, "selsync": 9.0}
    part = Part(list(needed), ["1gbit"], [1])
    _, done = trained(part, lambda told: 2.0 if told["length"] < needed[told["who"]] else 1.0)
    lengths = [(told["who"], told["length"]) for _, due in done[1:] for told in due]
    assert lengths == [
        *((who, 1.0) for who in needed),
        *((who, 1.5) for who in ("sgp", "hierarchical", "selsync")),
        *((who, 2.0) for who in ("hierarchical", "selsync")),
    ]


def test_what_is_there_is_not_trained_again():
    part = Part([DDP], ["1gbit", UNSHAPED], [1])
    rows, _ = trained(part, lambda told: 1.0)
    assert list(launches(TASK, "gpt", rows, part)) == []
    [(rate, [told])] = launches(TASK, "gpt", rows[:-1], part)
    assert (rate, told["seed"]) == (UNSHAPED, 1)


def test_the_target_is_the_mean_of_ddp_and_its_deviation():
    rows = [final(DDP, "1gbit", 1, 1.0), final(DDP, "1gbit", 2, 2.0), final(DDP, "1gbit", TUNING, 0.0)]
    assert target(rows, "gpt", "1gbit") == pytest.approx(1.5 + 0.5**0.5)
    assert target(rows, "gpt", "100mbit") is None


def test_time_to_quality_is_of_the_shortest_training_that_reaches_it_with_every_seed():
    ddp = [final(DDP, "1gbit", seed, 1.0) for seed in (1, 2)]
    short = [final("sgp", "1gbit", 1, 1.0, 4.0), final("sgp", "1gbit", 2, 2.0, 4.0)]
    longer = [final("sgp", "1gbit", seed, 0.0, 9.0, 1.5) for seed in (1, 2)]
    assert times([*ddp, *short], "gpt", "1gbit", "sgp") == {}
    assert over_ddp([*ddp, *short], "gpt", "1gbit", "sgp") is None
    assert times([*ddp, *short, *longer], "gpt", "1gbit", "sgp") == {
        1: pytest.approx(8.1),
        2: pytest.approx(8.1),
    }
    ratio = over_ddp([*ddp, *short, *longer], "gpt", "1gbit", "sgp")
    assert ratio is not None
    assert ratio.median == pytest.approx(0.81)


def test_goals_compare_the_best_of_ours_with_ddp_and_with_the_best_peer():
    rows = [
        final(DDP, "100mbit", 1, 1.0, 10.0), final("torch PostLocalSGD", "100mbit", 1, 1.0, 4.0),
        final("hierarchical", "100mbit", 1, 1.0, 3.0), final("sgp", "100mbit", 1, 2.0, 1.0),
        final(DDP, UNSHAPED, 1, 1.0, 10.0), final("bsp", UNSHAPED, 1, 1.0, 10.2),
    ]  # fmt: skip
    found = {goal.name: (round(goal.value, 3), goal.goal) for goal in goals(rows)}
    assert found == {
        "gpt, 100mbit: hierarchical, time to DDP's quality over DDP's": (0.3, 0.25),
        "gpt, 100mbit: hierarchical, time to DDP's quality over that of torch PostLocalSGD": (0.75, 1.0),
        "gpt, unshaped: bsp, seconds over DDP's": (1.02, 1.03),
    }
    assert [line[2:] for line in lines(rows) if line[2] in ("sgp", "hierarchical")] == [
        [
            "hierarchical",
            1.0,
            2,
            "1.000",
            "3.0",
            "5.0",
            "3.0",
            over_ddp(rows, "gpt", "100mbit", "hierarchical"),
        ],
        ["sgp", 1.0, 2, "2.000", "1.0", "5.0", "never", ""],
    ]
