"""Fit lines T = messages·α + load·β to measured seconds T, piecewise in the message size.

`messages` counts consecutive messages, `load` the bytes on shared links. Libraries change their algorithms
with the message size, so α and β change, too. The fit tries all ways to divide the sizes into at most three
ranges with a line each, and uses the one with the least BIC (Bayesian information criterion). It rejects
divisions with which more bytes would take less time, as noise can cause. Residuals are differences of
logarithms, so that the error at eight bytes counts as much as at 64 MB, and half the time as much as twice
the time. Their loss is soft L1, so that a single disturbed point changes the line little.

The error of the lines is measured at held-out points: every third size of each communicator.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hpcsgd.cost.collectives import messages
from hpcsgd.cost.link_classes import load
from hpcsgd.cost.links import Link, Points

Numbers = NDArray[np.float64]

SIZES = 4
"""The minimum number of sizes at which an operation has to be measured."""
PIECES = 3
"""The maximum number of pieces (lines)."""
SIZES_OF_A_PIECE = 3
"""The minimum number of sizes of a piece, if there are several pieces."""
NOTHING = 1e-9
"""The lower bound of the scaled α and β, because a logarithm needs a positive number."""
SCATTER = 0.1
"""Residuals above about this value count as disturbances: their loss is less than their square."""
HELD = 0.9
"""The share of the held-out points that are within the reported error."""
EXACT = 1e-3
"""Residuals below this value are so small that no further piece is added to reduce them."""


def fit(points: Sequence[Points]) -> Link:
    """Return the lines fitted to `points` as a `Link`.

    All `points` are of the same operation and kind of communicator. Each must have at least `SIZES` sizes.
    """
    operation, kind = points[0].operation, points[0].kind
    assert all((each.operation, each.kind) == (operation, kind) for each in points)
    assert all(len(set(each.bytes)) >= SIZES for each in points)
    lines = _lines(_samples(points))
    return Link(
        operation=operation,
        kind=kind,
        ranks=tuple(sorted({each.ranks for each in points})),
        from_bytes=tuple(line.start for line in lines),
        alpha_seconds=tuple(_rounded(line.alpha) for line in lines),
        beta_seconds_per_byte=tuple(_rounded(line.beta) for line in lines),
        alpha_standard_error_seconds=tuple(_rounded(line.alpha_error) for line in lines),
        beta_standard_error_seconds_per_byte=tuple(_rounded(line.beta_error) for line in lines),
        relative_error=_rounded(held_out_error(points)),
    )


def fits(points: Sequence[Points]) -> Iterator[Link]:
    """Yield a fitted `Link` for each operation, kind of communicator and number of ranks in `points`."""

    def name(each: Points) -> tuple[str, str, int]:
        return each.operation, each.kind, each.ranks

    for _, alike in itertools.groupby(sorted(points, key=name), key=name):
        yield fit(list(alike))


def held_out_error(points: Sequence[Points]) -> float:
    """Return the error e, at every third size, of lines that are fitted to the other two thirds.

    The share `HELD` (nine in ten) of these held-out points is within a factor 1 + e of the lines, in either
    direction.
    """
    lines = _lines(_samples([_only(each, lambda place: place % 3 != 1) for each in points]))
    unseen = _samples([_only(each, lambda place: place % 3 == 1) for each in points])
    errors = np.abs(np.log(predicted(lines, unseen) / unseen.seconds))
    return float(np.expm1(np.quantile(errors, HELD, method="higher")))


@dataclass(frozen=True)
class Samples:
    """Measured points of one operation on one kind of communicator, in order of their size.

    Each array has one entry per point.
    """

    nbytes: Numbers
    messages: Numbers
    load: Numbers
    seconds: Numbers

    def between(self, start: float, stop: float) -> Samples:
        """Return the points of at least `start` and less than `stop` bytes."""
        low, high = np.searchsorted(self.nbytes, [start, stop])
        part = slice(int(low), int(high))
        return Samples(self.nbytes[part], self.messages[part], self.load[part], self.seconds[part])


@dataclass(frozen=True)
class Line:
    """One piece of a piecewise fit: T = messages·alpha + load·beta from `start` bytes on."""

    start: int
    """The size in bytes from which on this line is used."""
    alpha: float
    beta: float
    alpha_error: float
    beta_error: float
    cost: float
    """The loss, summed over the piece's points."""


def predicted(lines: Sequence[Line], x: Samples) -> Numbers:
    """Return the seconds that `lines` predict for each point of `x`."""
    place = np.searchsorted([line.start for line in lines], x.nbytes, side="right") - 1
    alpha, beta = (np.asarray([getattr(line, name) for line in lines]) for name in ("alpha", "beta"))
    return x.messages * alpha[place] + x.load * beta[place]


def _samples(points: Sequence[Points]) -> Samples:
    rows = [
        (n, float(messages(each.operation, each.ranks)), load(each.operation, n, each.link_class), seconds)
        for each in points
        for n, seconds in zip(each.bytes, each.seconds, strict=True)
    ]
    columns = np.asarray(sorted(rows), float).T
    return Samples(*columns)


def _only(points: Points, wanted: Callable[[int], bool]) -> Points:
    """Return the points of some sizes. `wanted` decides by the index of a size in ascending order."""
    sizes = sorted(set(points.bytes))
    kept = {size for place, size in enumerate(sizes) if wanted(place)}
    pairs = [pair for pair in zip(points.bytes, points.seconds, strict=True) if pair[0] in kept]
    kept_bytes, kept_seconds = zip(*pairs, strict=True)
    return replace(points, bytes=kept_bytes, seconds=kept_seconds, bare_seconds=())


def _lines(x: Samples) -> list[Line]:
    """Return the lines of the division of sizes into pieces that has the least BIC.

    Each piece counts as two parameters (α and β), and each boundary between pieces as one.
    """
    sizes = _apart(x.nbytes)
    ends = [0, *sizes[1:], np.inf]

    @functools.cache
    def line(first: int, last: int) -> Line:
        return _line(int(ends[first]), x.between(ends[first], ends[last]))

    def criterion(cut: tuple[int, ...]) -> float:
        N, pieces = len(x.seconds), list(itertools.pairwise(cut))
        cost = max(sum(line(*piece).cost for piece in pieces) / N, EXACT**2)
        return N * math.log(cost) + (3 * len(pieces) - 1) * math.log(N)

    def grows(cut: tuple[int, ...]) -> bool:
        lines = [line(*piece) for piece in itertools.pairwise(cut)]
        return all(_grows(x, before, after) for before, after in itertools.pairwise(lines))

    best = next(cut for cut in sorted(_cuts(len(sizes)), key=criterion) if grows(cut))
    return [line(*piece) for piece in itertools.pairwise(best)]


def _grows(x: Samples, before: Line, after: Line) -> bool:
    """Return True if the line `after` begins with at least the time that `before` predicts there.

    `SCATTER` is the tolerance.
    """
    there = replace(x, nbytes=np.full_like(x.nbytes, after.start), load=after.start * x.load / x.nbytes)
    times = [there.messages * line.alpha + there.load * line.beta for line in (before, after)]
    return bool(np.all(times[1] >= (1 - SCATTER) * times[0]))


def _apart(nbytes: Numbers) -> list[int]:
    """Return a subset of the sizes `nbytes`, in ascending order, each at least twice the one before.

    Communicators of different numbers of ranks were measured at almost the same sizes, between which no
    boundary of pieces is needed.
    """
    kept: list[int] = []
    for size in np.unique(nbytes):
        if not kept or size >= 2 * kept[-1]:
            kept.append(int(size))
    return kept


def _cuts(sizes: int) -> Iterator[tuple[int, ...]]:
    """Yield all divisions of `sizes` sizes into pieces, each as the indices at which pieces begin or end."""
    for knees in range(PIECES):
        for inner in itertools.combinations(range(1, sizes), knees):
            cut = (0, *inner, sizes)
            if knees == 0 or all(b - a >= SIZES_OF_A_PIECE for a, b in itertools.pairwise(cut)):
                yield cut


def _line(start: int, x: Samples) -> Line:
    from scipy.optimize import least_squares  # imported late: training must not depend on scipy

    columns = np.stack([x.messages, x.load], axis=1) / x.seconds[:, None]
    scale = np.linalg.norm(columns, axis=0)  # so that both parameters are about 1
    columns /= scale
    found = least_squares(
        lambda u: np.log(columns @ u),
        np.full(2, 0.5 * math.sqrt(len(columns))),
        jac=lambda u: columns / (columns @ u)[:, None],  # pyright: ignore[reportArgumentType]
        bounds=(NOTHING, np.inf),
        loss="soft_l1",
        f_scale=SCATTER,
    )
    variance = 2 * found.cost / max(len(columns) - 2, 1)
    errors = np.sqrt(np.diag(np.linalg.pinv(found.jac.T @ found.jac) * variance))
    (alpha, beta), (alpha_error, beta_error) = (map(float, each / scale) for each in (found.x, errors))
    return Line(start, alpha, beta, alpha_error, beta_error, cost=2 * float(found.cost))


def _rounded(value: float) -> float:
    """Return `value` rounded to the four significant digits that a machine file has."""
    return float(f"{value:.4g}")
