"""What `guard.py` trains, and how it judges its rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from density.tasks import Samples
from guard.judging import judged
from guard.training import BATCH, GUARDED, METHODS, NOISY, PLAIN, WITHOUT, Setting, batch, measure

WHO = "hierarchical"


def row(case: str, seed: int, loss: float) -> dict[str, Any]:
    return {"who": WHO, "case": case, "seed": seed, "test_loss": loss}


def test_losses_are_compared_seed_by_seed():
    """The median counts, and the order of the rows does not matter."""
    rows = [row(WITHOUT, seed, float(seed)) for seed in (3, 1, 2)]
    rows += [row(GUARDED, seed, 1.02 * seed) for seed in (1, 2)] + [row(GUARDED, 3, 3.0)]
    rows += [row(PLAIN, seed, 2.0 * seed) for seed in (1, 2, 3)]
    lines, goals = judged(rows)
    assert [line[:3] for line in lines] == [[WHO, PLAIN, 3], [WHO, GUARDED, 3]]
    assert [goal.value for goal in goals] == pytest.approx([0.5, 1.02])
    assert [goal.met for goal in goals] == [True, False]


def test_a_plain_mean_as_good_as_without_the_group_is_a_miss():
    _, [goal] = judged([row(WITHOUT, 1, 1.0), row(PLAIN, 1, 1.005)])
    assert not goal.met


def test_noise_is_of_the_size_of_a_batch():
    samples = Samples(torch.zeros(50, 1, 8, 8), torch.zeros(50, dtype=torch.int64), *torch.empty(2, 0))
    for noise in (False, True):
        x, y = batch(samples, torch.Generator().manual_seed(0), noise=noise)
        assert x.shape == (BATCH, 1, 8, 8)
        assert y.shape == (BATCH,)
        assert bool(x.any()) == bool(y.any()) == noise


@pytest.mark.slow
@pytest.mark.parametrize("who", METHODS)
def test_the_group_is_left_out_from_the_first_noise_on(who: str) -> None:
    """The other groups see the same batches, whether they train with this group or alone."""
    chance = torch.Generator().manual_seed(0)
    x, y = torch.rand(200, 1, 8, 8, generator=chance), torch.randint(0, 10, (200,), generator=chance)
    setting = Setting(steps=120, noise_from=100)
    found = {
        case: measure(setting, Samples(x, y, x, y), who, case, NOISY) for case in (WITHOUT, PLAIN, GUARDED)
    }
    assert found[GUARDED]["left_out"] >= 3
    assert found[WITHOUT]["left_out"] == found[PLAIN]["left_out"] == 0
    assert found[GUARDED]["test_loss"] < found[PLAIN]["test_loss"]
