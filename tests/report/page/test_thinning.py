from __future__ import annotations

import numpy as np
import pytest

from hpcsgd.report.page.reading import PhaseCourse, Ruler
from hpcsgd.report.page.thinning import BUCKETS, ThinnedCourse


def thinned(values: np.ndarray, most: int = BUCKETS) -> ThinnedCourse:
    course = ThinnedCourse(most)
    for at, value in enumerate(values.tolist(), start=1):
        course.add(at, value)
    return course


def test_few_values_are_as_they_are() -> None:
    values = np.random.default_rng(1).normal(size=BUCKETS)
    assert thinned(values).points() == list(enumerate(values.tolist(), start=1))


@pytest.mark.parametrize("n", [601, 1200, 1201, 5000, 77_777])
def test_every_spike_is_there(n: int) -> None:
    """Spikes at any position remain, as do the last value and the extremes of all stretches."""
    values = np.random.default_rng(n).normal(size=n)
    spikes = [1, n // 3, n - 2]
    values[spikes] = [50.0, -60.0, 70.0]
    course = thinned(values)
    points = course.points()
    assert len(points) <= 2 * BUCKETS + 1
    assert {(at + 1, values[at]) for at in spikes} <= set(points)
    assert points[-1] == (n, values[-1])
    assert [at for at, _ in points] == sorted({at for at, _ in points})
    width = 2 ** int(np.ceil(np.log2(n / BUCKETS)))
    for begin in range(0, n, width):
        stretch = values[begin : begin + width]
        assert {(begin + 1 + i, stretch[i]) for i in (stretch.argmin(), stretch.argmax())} <= set(points)
    assert course.extremes() == (-60.0, 70.0)


def test_means_are_of_stretches_as_long_as_each_other() -> None:
    values = np.random.default_rng(3).normal(size=64)
    found = np.array(thinned(values, 16).means(8))
    expected = [(8 * i + 4.5, values[8 * i : 8 * i + 8].mean()) for i in range(8)]
    np.testing.assert_allclose(found, expected)


def test_memory_is_that_of_the_buckets() -> None:
    course = thinned(np.zeros(100_000), 10)
    assert len(course._buckets) <= 10
    assert sum(bucket.values for bucket in course._buckets) == course.values == 100_000


def test_what_is_not_finite_is_counted_and_in_no_point() -> None:
    course = thinned(np.array([1.0, np.nan, 2.0, np.inf, -np.inf]))
    assert course.points() == [(1, 1.0), (3, 2.0)]
    assert (course.strange, course.strange_at, course.values) == (3, 2, 2)
    assert thinned(np.array([np.nan])).points() == []
    assert thinned(np.array([np.nan])).extremes() is None


def test_the_ruler_is_exact_at_what_it_keeps_and_ends_where_the_run_does() -> None:
    ruler = Ruler()
    for step in range(1, 12_346):
        ruler.add((step, 2 * step, 3 * step, 4 * step))
    rows = ruler.rows(300)
    assert len(rows) <= 301
    assert rows[0] == (0, 0, 0, 0)
    assert rows[-1] == (12_345, 24_690, 37_035, 49_380)
    assert all(row == (row[0], 2 * row[0], 3 * row[0], 4 * row[0]) for row in rows)
    gaps = np.diff([row[0] for row in rows])[:-1]
    assert gaps.min() == gaps.max()


def test_stretches_of_phases_add_up() -> None:
    course = PhaseCourse()
    seconds = np.random.default_rng(4).random((3001, 2))
    for i, (a, b) in enumerate(seconds.tolist(), start=1):
        course.add(2 * i, {"a": a, "b": b})
    found = course.stretches()
    assert len(found) <= PhaseCourse.most
    assert found[-1][0] == 6002
    assert sum(steps for _, steps, _ in found) == 6002
    assert [sum(s[name] for *_, s in found) for name in "ab"] == pytest.approx(list(seconds.sum(0)))
    end, steps, first = found[0]
    assert (end, steps) == (16, 16), "eight readings of two steps: 3001 make 376 stretches"
    assert first["a"] == pytest.approx(seconds[:8, 0].sum())
