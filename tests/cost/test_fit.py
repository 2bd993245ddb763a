from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from hpcsgd.cost.collectives import messages
from hpcsgd.cost.fit import fit, held_out_error
from hpcsgd.cost.link_classes import LinkClass, load
from hpcsgd.cost.links import Link, Points

ALPHA, BETA = 2e-6, 8e-11
SIZES = tuple(8 * 4**i for i in range(12))
WAYS = (LinkClass(2, 1, 2), LinkClass(4))
Law = Callable[[float], tuple[float, float]]


def one_line(nbytes: float) -> tuple[float, float]:
    return ALPHA, BETA


def two_lines(nbytes: float) -> tuple[float, float]:
    return (ALPHA, BETA) if nbytes < 2**17 else (30e-6, BETA / 4)


def measured(
    law: Law,
    noise: float = 0.0,
    seed: int = 0,
    operation: str = "allreduce",
    ways: Sequence[LinkClass] = WAYS,
    sizes: Sequence[int] = SIZES,
) -> list[Points]:
    """Return times by a law of α and β, each multiplied by a lognormal factor."""
    generator = np.random.default_rng(seed)
    points = []
    for way in ways:
        seconds = []
        for n in sizes:
            alpha, beta = law(n)
            true = float(messages(operation, way.ranks)) * alpha + load(operation, n, way) * beta
            seconds.append(true * float(np.exp(generator.normal(0, noise))))
        points.append(
            Points(
                operation=operation, ranks=way.ranks, hosts=way.hosts, at_once=way.at_once,
                bytes=tuple(sizes), seconds=tuple(seconds),
            )
        )  # fmt: skip
    return points


def with_outliers(points: list[Points], factor: float, *places: int) -> list[Points]:
    seconds = list(points[0].seconds)
    for place in places:
        seconds[place] *= factor
    first = points[0]
    return [
        Points(
            operation=first.operation, ranks=first.ranks, hosts=first.hosts, at_once=first.at_once,
            bytes=first.bytes, seconds=tuple(seconds),
        ),
        *points[1:],
    ]  # fmt: skip


@pytest.mark.parametrize("operation", ["allreduce", "alltoall", "sendrecv", "bcast"])
@pytest.mark.parametrize("ways", [WAYS, (LinkClass(4, 4),), (LinkClass(8, 4), LinkClass(8, 4, 2))])
def test_what_has_no_noise_is_found_exactly(operation: str, ways: Sequence[LinkClass]) -> None:
    link = fit(measured(one_line, operation=operation, ways=ways))
    assert (link.operation, link.kind) == (operation, ways[0].kind)
    assert link.ranks == tuple(sorted({way.ranks for way in ways}))
    assert link.from_bytes == (0,)
    assert link.alpha_seconds == pytest.approx([ALPHA], rel=1e-3)
    assert link.beta_seconds_per_byte == pytest.approx([BETA], rel=1e-3)
    assert link.relative_error < 1e-3


def test_a_knee_is_found_where_it_is() -> None:
    link = fit(measured(two_lines))
    assert link.from_bytes == (0, 2**17)
    assert link.alpha_seconds == pytest.approx([ALPHA, 30e-6], rel=1e-2)
    assert link.beta_seconds_per_byte == pytest.approx([BETA, BETA / 4], rel=1e-2)


def test_two_knees() -> None:
    def law(n: float) -> tuple[float, float]:
        return (1e-6, 2e-10) if n < 2**11 else (5e-6, 1e-10) if n < 2**19 else (5e-6, 1e-9)

    link = fit(measured(law, noise=0.02))
    assert link.from_bytes == (0, 2**11, 2**19)


@pytest.mark.slow
@pytest.mark.parametrize("law", [one_line, two_lines])
def test_the_truth_is_within_three_standard_errors(law: Law) -> None:
    """This holds in at least 18 of 20 trials, each with noise of a tenth."""
    hits = 0
    for seed in range(20):
        link = fit(measured(law, noise=0.1, seed=seed))
        alpha, beta = law(8)[0], law(SIZES[-1])[1]
        hits += (
            abs(link.alpha_seconds[0] - alpha) < 3 * link.alpha_standard_error_seconds[0]
            and abs(link.beta_seconds_per_byte[-1] - beta) < 3 * link.beta_standard_error_seconds_per_byte[-1]
        )
    assert hits >= 18


def test_sizes_that_ways_nearly_share_are_one_size() -> None:
    """Sizes differ because they are rounded to multiples that p ranks can share."""
    points = [
        each
        for p in (2, 3, 4, 6, 12)
        for each in measured(
            two_lines, 0.02, ways=(LinkClass(p),), sizes=[-(-n // (4 * p)) * 4 * p for n in SIZES]
        )
    ]
    link = fit(points)
    assert len(link.from_bytes) == 2
    assert 2**16 < link.from_bytes[1] <= 2**17


def test_more_bytes_never_take_less() -> None:
    """The fit does not decrease, although four sizes in the middle were disturbed alike."""
    link = fit(with_outliers(measured(one_line, ways=WAYS[:1]), 6.0, 4, 5, 6, 7))
    told = [link.seconds("allreduce", n, WAYS[0]) for n in range(8, 2**20, 97)]
    assert all(b >= 0.9 * a for a, b in itertools.pairwise(told))


@pytest.mark.slow
def test_noise_makes_no_knees() -> None:
    knees = [len(fit(measured(one_line, noise=0.1, seed=seed)).from_bytes) - 1 for seed in range(20)]
    assert sum(map(bool, knees)) <= 2


def test_disturbed_points_move_the_lines_little() -> None:
    calm = measured(one_line, noise=0.02)
    link = fit(with_outliers(calm, 8.0, 2, 9))
    assert link.alpha_seconds[0] == pytest.approx(ALPHA, rel=0.15)
    assert link.beta_seconds_per_byte[-1] == pytest.approx(BETA, rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize(("law", "most"), [(one_line, 0.99), (two_lines, 1.0)])
def test_the_reported_error_is_that_of_points_never_seen(law: Law, most: float) -> None:
    """The stated error covers about nine of ten new measurements at sizes in between.

    If the change of slope may be on either side of a size, the error is larger.
    """
    between = tuple(20 * 4**i for i in range(11))
    within = total = 0
    for seed in range(10):
        link = fit(measured(law, noise=0.1, seed=seed))
        for fresh in measured(law, noise=0.1, seed=1000 + seed, sizes=between):
            for n, seconds in zip(fresh.bytes, fresh.seconds, strict=True):
                off = abs(np.log(link.seconds("allreduce", n, fresh.link_class) / seconds))
                within += off <= np.log(1 + link.relative_error)
                total += 1
    assert 0.8 * total <= within <= most * total


def test_what_is_held_out_is_not_fitted() -> None:
    """If they were fitted, too, the outliers of a factor would not be visible."""
    points = measured(one_line, ways=WAYS[:1])
    held = with_outliers(points, 3.0, 1, 4, 7)
    assert held_out_error(held) == pytest.approx(2.0, rel=0.05)


def test_latencies_alone_have_no_bandwidth() -> None:
    """Times that do not depend on the bytes give β = 0, and nothing negative."""
    link = fit(measured(lambda n: (ALPHA, 0.0), noise=0.05))
    assert link.alpha_seconds[0] == pytest.approx(ALPHA, rel=0.05)
    assert 0 <= link.beta_seconds_per_byte[-1] < BETA / 50


def test_too_few_sizes_are_a_mistake_of_ours() -> None:
    with pytest.raises(AssertionError):
        fit(measured(one_line, sizes=SIZES[:3]))


def test_points_of_two_kinds_are_a_mistake_of_ours() -> None:
    with pytest.raises(AssertionError):
        fit(measured(one_line, ways=(LinkClass(4), LinkClass(4, 4))))


def test_lines_tell_the_seconds_that_they_were_fitted_to() -> None:
    link: Link = fit(points := measured(two_lines))
    for each in points:
        told = [link.seconds("allreduce", n, each.link_class) for n in each.bytes]
        assert told == pytest.approx(each.seconds, rel=1e-2)
