"""The judgment of `ensemble.py --slow`, on curves that were not measured."""

from __future__ import annotations

from ensemble.slow import ALL, QUORUM, over_all

WAITED = {"who": ALL, "seed": 1, "seconds": [10.0, 20.0, 40.0], "losses": [3.0, 2.0, 1.0]}


def curve(*losses: float) -> dict[str, object]:
    return {"who": QUORUM, "seed": 1, "seconds": [4.0, 8.0, 16.0][: len(losses)], "losses": list(losses)}


def test_the_target_is_the_last_loss_of_the_run_that_waits() -> None:
    rows = [WAITED, curve(3.0, 2.0, 0.0), {**WAITED, "seed": 2, "losses": [9.0, 9.0, 9.0]}]
    assert over_all(rows, 1) == 12 / 40
    assert over_all([WAITED, curve(3.0, 2.0, 1.5)], 1) is None
