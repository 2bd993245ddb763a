"""The local and synchronous steps that a δ would give for recorded steps."""

from __future__ import annotations

import json
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from hpcsgd.performance.probing.changes import changes_of, plot, table, to_json

ROWS = [[9.0, 9.0], *[[n / 10, 0.01 * (n % 3)] for n in range(1, 21)]]


def test_a_step_is_local_where_no_group_changed_as_much() -> None:
    changes = changes_of(ROWS)
    assert changes.largest.tolist() == [n / 10 for n in range(1, 21)], "without the first step"
    assert (changes.lssr(0.0), changes.lssr(0.1), changes.lssr(1.05), changes.lssr(3.0)) == (0, 0, 0.5, 1)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0, 1))
def test_delta_is_the_smallest_that_was_seen_to_do(largest: list[float], wanted: float) -> None:
    changes = changes_of([[0.0], *[[x] for x in largest]])
    delta = changes.delta(wanted)
    assert changes.lssr(delta) >= wanted
    assert changes.lssr(float(np.nextafter(delta, 0))) < max(wanted, 1 / len(largest)) or wanted == 0


def test_the_table() -> None:
    assert table(changes_of(ROWS)) == [
        " LSSR          δ     syncs  sends 1/",
        " 0.50          1        10       2.0",
        " 0.75        1.5         5       4.0",
        " 0.90        1.8         2      10.0",
        " 0.95        1.9         1      20.0",
        " 1.00          2         0         ∞",
    ]


@pytest.mark.filterwarnings("error")
def test_the_picture_and_the_numbers(tmp_path: Path) -> None:
    changes = changes_of([*ROWS, [0.0, 0.0]])
    plot(changes, tmp_path / "delta.png")
    assert (tmp_path / "delta.png").read_bytes().startswith(b"\x89PNG")
    told = json.loads(json.dumps(to_json(changes, {"method": {"name": "selsync"}})))
    assert [row["lssr"] for row in told["rows"]] == pytest.approx([11 / 21, 16 / 21, 19 / 21, 20 / 21, 1])
    assert len(told["deltas"]) == 21
