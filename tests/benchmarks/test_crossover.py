"""What `crossover.py` computes from predicted and measured points, and that the docs agree with it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from crossover import (
    HEAD,
    LATE,
    LOCAL,
    METHODS,
    RATES,
    SYNCHRONOUS,
    cells,
    crossing,
    goals,
    lines,
    panels,
    points,
)

ROOT = Path(__file__).parents[2]
Row = dict[str, Any]


def line(*seconds: float) -> list[Row]:
    return [{"rate": 10.0**i, "seconds": each} for i, each in enumerate(seconds)]


def measured(
    who: str, *seconds: float, rate: str = "1gbit", model: str = "6 M", kind: str = "emulated"
) -> Row:
    return {"who": who, "seconds": list(seconds), "rate": rate, "model": model, "kind": kind}


def test_the_crossing_is_where_it_stays_good_enough():
    assert crossing(line(3.0, 1.0, 2.0, 1.0, 0.5), [1.0] * 5) == 1000.0
    assert crossing(line(1.0, 1.0), [1.0, 1.0]) == 1.0
    assert math.isinf(crossing(line(1.0, 3.0), [2.0, 2.0]))


def test_of_ddp_the_fastest_bucket_size_counts_and_only_of_the_same_setting():
    found = [
        measured("DDP 1 MB", 3.0, 1.0, 2.0), measured("DDP 25 MB", 4.0), measured("bsp", 5.0),
        measured("bsp, prefetch", 0.1), measured("bsp", 0.2, model="25 M"), measured("bsp", 0.3, kind="real"),
    ]  # fmt: skip
    first, *others = panels()
    assert [(row["who"], row["rate"], row["seconds"]) for row in points(first, found)] == [
        ("DDP", 1e9, 2.0),
        ("bsp", 1e9, 5.0),
    ]
    assert [points(panel, found) for panel in others] == [[], []]


@pytest.mark.slow
def test_lines_fall_with_the_rate_to_computing_and_late_averages_are_lowest():
    [panel, *_] = panels()
    rows = lines(panel)
    by = {name: [row["seconds"] for row in rows if row["method"] == name] for name in METHODS}
    for seconds in by.values():
        assert len(seconds) == len(RATES)
        assert seconds == sorted(seconds, reverse=True)
        assert panel.seconds <= seconds[-1] < 1.02 * panel.seconds
    # Where links are the limit, a step takes the time to send 2(P−1)/P·M numbers, or an eighth of them.
    least = 2 * 3 / 4 * 4 * 12 * 707**2 * 8 / RATES[0]
    assert by[SYNCHRONOUS][0] == pytest.approx(least, rel=0.05)
    assert by[LATE][0] == pytest.approx(least / 8, rel=0.05)
    assert by[LOCAL][0] == pytest.approx(least / 8 + panel.seconds, rel=0.05)


def test_the_error_is_that_of_the_line_at_the_point():
    rows = [{"panel": "a", "method": "m", "rate": r, "seconds": s} for r, s in ((1.0, 2.0), (3.0, 4.0))]
    rows.append({"panel": "b", "method": "m", "rate": 2.0, "seconds": 9.0})
    [goal] = goals([*rows, {"panel": "a", "method": "m", "who": "bsp", "rate": 2.0, "seconds": 2.0}])
    assert goal.value == pytest.approx(0.5)


def test_the_page_says_what_was_computed():
    rows = json.loads((ROOT / "benchmarks/results/crossover.json").read_text())["rows"]
    page = (ROOT / "docs/choosing.md").read_text()
    for panel in panels():
        assert f"| {' | '.join(map(str, cells(panel, rows)))} |" in page
    assert f"| {' | '.join(HEAD)} |" in page
