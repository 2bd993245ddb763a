"""How `slow_group.py` judges its rows, and that its script runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from programs import run
from pythons import python
from slow_group.contestants import ASYNC, CONTESTANTS, DILOCO, Training
from slow_group.judging import MOST, SHARES, TUNED, finals, is_done, judged, trials

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PATIENCE = 300.0
"""Seconds; ranks start four times, and the machine may be busy."""
FAST, WORSE = CONTESTANTS[ASYNC].trials[:2]


def row(who: str, seed: int, share: float, loss: float, seconds: float, **other: Any) -> dict[str, Any]:
    settings = CONTESTANTS[who].trials[0] if who == DILOCO else FAST
    found = {"who": who, "settings": settings, "seed": seed, "share": share, "seconds": seconds}
    return found | {"held_out_loss": loss, "test_loss": loss, "steps": [4, 1], "late_steps": 1} | other


def test_time_and_loss_are_compared_seed_by_seed():
    """A seed that only one of both has does not count, and neither does the trial."""
    rows = [row(who, TUNED, share, 9.0, 9.0) for who, share in ((DILOCO, 1.0), (ASYNC, MOST))]
    rows += [row(ASYNC, TUNED, MOST, 9.5, 9.0, settings=WORSE)]
    rows += [row(DILOCO, seed, 1.0, 2.0, 10.0 * seed) for seed in (1, 2)]
    rows += [row(ASYNC, seed, MOST, 2.0 * loss, 4.4 * seed) for seed, loss in ((2, 1.1), (1, 0.8), (3, 5.0))]
    rows += [row(ASYNC, 1, MOST, 1.0, 1.0, settings=WORSE)]
    lines, goals = judged(rows)
    assert [(line[0], line[1]) for line in lines] == [(DILOCO, 2), (ASYNC, 3)]
    assert [goal.value for goal in goals] == pytest.approx([0.44, 0.95])
    assert [goal.met for goal in goals] == [True, True]


def test_the_best_trial_decides_what_is_trained():
    rows = [row(ASYNC, TUNED, MOST, 3.0, 1.0), row(ASYNC, TUNED, MOST, 2.0, 1.0, settings=WORSE)]
    wanted = list(finals(ASYNC, (1, 2), rows))
    assert wanted == [Training(ASYNC, WORSE, seed, share) for seed in (1, 2) for share in SHARES]
    assert [is_done(training, rows) for training in trials(ASYNC)] == [True, True, False, False]
    assert not list(finals(DILOCO, (1,), rows))


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE + 20)
def test_it_runs(tmp_path: Path) -> None:
    text, data = tmp_path / "text", tmp_path / "text.h5"
    text.write_text("the groups of this text do not wait for each other. " * 2000)
    convert = ["data", "convert", "text", str(text), str(data), "--tokenizer", "bytes", "--test", str(text)]
    run(python("-m", "hpcsgd", *convert), cwd=tmp_path, timeout=PATIENCE)
    quick = [str(BENCHMARKS / "slow_group.py"), "--data", str(data), "--quick", "--who", DILOCO, ASYNC]
    done = run(python(*quick), cwd=tmp_path, timeout=PATIENCE)
    assert f"{ASYNC}: loss over that of DiLoCo, in this time" in done.stdout
