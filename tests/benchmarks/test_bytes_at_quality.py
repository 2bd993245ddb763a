"""What `bytes_at_quality.py` trains, and how it judges its rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import pytest

from bytes_at_quality.contestants import (
    BSP,
    CONTESTANTS,
    DILOCO,
    MULOCO,
    PIER,
    SCHEDULED,
    SPARSE_SCHEDULED,
)
from bytes_at_quality.judging import TUNED, best, due, finals, is_of_now, judged
from bytes_at_quality.training import FULL, predicted, start_of

SEEDS = (1, 2)


def row(
    who: str, groups: int, seed: int, settings: Mapping[str, float], loss: float, sent: float = 100.0
) -> dict[str, Any]:
    losses = {"held_out_loss": loss, "test_loss": loss}
    settled = {"settings": dict(settings), "setting": asdict(FULL)}
    return {"who": who, "groups": groups, "seed": seed, "bytes": sent, "formula": sent, **settled, **losses}


def trained(who: str, shapes: tuple[int, ...], losses: Mapping[int, float]) -> list[dict[str, Any]]:
    """Return the rows of all trainings that are due. Trial i has the loss `losses[i]`, or else 9."""
    rows: list[dict[str, Any]] = []
    trials = CONTESTANTS[who].trials
    for groups, seed, settings in due(rows, who, shapes, SEEDS, len(trials)):
        rows.append(row(who, groups, seed, settings, losses.get(trials.index(settings), 9.0)))
    return rows


def test_everybody_is_tried_as_often():
    assert {len(contestant.trials) for contestant in CONTESTANTS.values()} == {FULL.trials}


@pytest.mark.parametrize("shapes", [(4, 8), (8, 4)])
def test_bsp_is_tried_by_the_fewest_groups_and_trained_by_all(shapes: tuple[int, ...]):
    rows = trained(BSP, shapes, {2: 1.0})
    assert [(r["groups"], r["seed"]) for r in rows] == [(4, TUNED)] * 4 + [(4, 1), (4, 2), (8, 1), (8, 2)]
    assert all(r["settings"] == CONTESTANTS[BSP].trials[2] for r in rows if r["seed"] != TUNED)


def test_others_are_tried_by_all_groups():
    rows = trained(DILOCO, (4, 8), {1: 1.0})
    assert [r["groups"] for r in rows if r["seed"] == TUNED] == [4] * 4 + [8] * 4


def test_the_best_trial_is_that_of_the_same_groups():
    first, second = CONTESTANTS[DILOCO].trials[:2]
    rows = [row(DILOCO, 4, TUNED, first, 1.0), row(DILOCO, 4, TUNED, second, 2.0)]
    rows += [row(DILOCO, 8, TUNED, first, 3.0), row(DILOCO, 8, TUNED, second, 0.5)]
    rows.append(row(DILOCO, 4, 1, second, 0.1))  # not a trial
    assert best(rows, DILOCO, 4) == first
    assert best(rows, DILOCO, 8) == second
    assert finals(rows, DILOCO, 4) == {}


def test_trainings_that_would_be_others_today_are_not_kept():
    kept = row(DILOCO, 4, 1, CONTESTANTS[DILOCO].trials[0], 1.0)
    assert is_of_now(kept, FULL)
    assert not is_of_now(kept, replace(FULL, steps=1))
    assert not is_of_now(kept | {"settings": kept["settings"] | {"momentum": 0.95}}, FULL)
    assert not is_of_now(kept | {"who": "nobody"}, FULL)


def test_losses_are_compared_seed_by_seed():
    rows = trained(BSP, (4,), {0: 1.0}) + trained(DILOCO, (4,), {1: 1.5}) + trained(MULOCO, (4,), {2: 1.2})
    del rows[-1]  # MuLoCo's seed 2: DiLoCo's seed 2 has nothing to be compared with
    next(r for r in rows if r["who"] == DILOCO and r["seed"] == 2)["test_loss"] = 100.0
    lines, goals = judged(rows)
    assert [line[:3] for line in lines] == [[4, BSP, 2], [4, DILOCO, 2], [4, MULOCO, 1]]
    [muloco] = [goal for goal in goals if goal.name.startswith("4 groups: loss of MuLoCo")]
    assert muloco.value == pytest.approx(1.2 / 1.5)
    assert muloco.met


def test_bytes_that_are_not_those_of_the_formula_are_a_miss():
    rows = trained(BSP, (4,), {0: 1.0})
    rows[3]["bytes"] *= 1.01
    [of_bytes] = judged(rows)[1]
    assert of_bytes.value == pytest.approx(0.01)
    assert not of_bytes.met


def test_bytes_of_pier_are_those_of_both_of_its_parts():
    """384 of the 4096 steps are synchronous, a multiple of 64."""
    bsp, diloco, pier = (
        predicted(FULL, start_of(FULL, 1), who, 4, CONTESTANTS[who].trials[0]) for who in (BSP, DILOCO, PIER)
    )
    assert pier == pytest.approx((384 * bsp + 3712 * diloco) / 4096)


@pytest.mark.parametrize(("groups", "most"), [(4, 1.02), (8, 1.06)])
def test_goals_of_schedules(groups: int, most: float):
    rows = trained(BSP, (groups,), {0: 1.0}) + trained(SCHEDULED, (groups,), {1: 1.05})
    rows += trained(SPARSE_SCHEDULED, (groups,), {2: 1.06})
    goals = {goal.name: goal for goal in judged(rows)[1]}
    over = goals[f"{groups} groups: loss of {SCHEDULED} over that of {BSP}"]
    assert (over.value, over.goal, over.met) == (pytest.approx(1.05), most, most > 1.05)
    assert not goals[f"{groups} groups: loss of {SPARSE_SCHEDULED} over that of {SCHEDULED}"].met
