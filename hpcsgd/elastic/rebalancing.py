"""Reallocation of compute: slow islands get more of it, and what the dead leave goes to the living.

EnsembleSync (papers/ensemblesync.txt), section 3.2. With x_i units of compute island i needs t_i = α_i/x_i
seconds for an epoch, so α_i = t_i·x_i is estimated from the last one. Lemma 1: max t_i is smallest under
Σ x_i = X (the paper's budget B) where all t_i are the same,

    t* = Σ α_j / X,   x_i* = X·α_i / Σ α_j.

A unit is whatever can be moved: a rank of the group, a CPU thread of each rank, a sample of the micro-batch,
which is the paper's GPU memory. Nothing here moves it. What differs from the paper:

- Units are whole, and each island keeps at least one, for x_i < 1 would mean that it never finishes. Under
  x_i ≥ 1 the lemma reads x_i = max(1, α_i/t) with t such that the sum is X; `shares` rounds that.
- The paper moves units after every epoch. Here a move must be worth it: see `Reallocation`.
- An island that returns has no last epoch and counts as an average one. In the paper it begins with its old
  estimate and approaches the equilibrium slowly; here it is there after the first epoch it has finished.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import floor, isfinite
from statistics import fmean

from hpcsgd.errors import UserError, count_text


def shares(alpha: Mapping[int, float], X: int) -> dict[int, int]:
    """x_i by island: whole, at least 1, Σ x_i = X, less than one unit from Lemma 1 (under x_i ≥ 1).

    Rounded by largest remainder, ties to the lowest island. This is not always the best of all whole x:
    one more unit for everybody would bring max t_i to the best or below, no more is promised.
    Raises `UserError` where there are fewer units than islands, or an α that is no positive number.

    >>> shares({0: 1.0, 1: 3.0}, 256)
    {0: 64, 1: 192}
    """
    for replica_group, a in alpha.items():
        if not (isfinite(a) and a > 0):
            raise UserError(f"island {replica_group}: alpha = {a}, must be positive and finite")
    if len(alpha) > X:
        raise UserError(
            f"{count_text(X, 'unit')} for {count_text(len(alpha), 'island')}: each needs at least one"
        )
    exact = _lemma_1({replica_group: Fraction(a) for replica_group, a in sorted(alpha.items())}, X)
    x = {replica_group: floor(share) for replica_group, share in exact.items()}
    by_remainder = sorted(
        x, key=lambda replica_group: x[replica_group] - exact[replica_group]
    )  # stable: ties by island
    for replica_group in by_remainder[: X - sum(x.values())]:
        x[replica_group] += 1
    return x


def _lemma_1(alpha: Mapping[int, Fraction], X: int) -> dict[int, Fraction]:
    """x_i* = max(1, α_i/t*). Fractions, so that equal remainders are equal."""
    shares = dict.fromkeys(alpha, Fraction(1))
    richer: Mapping[int, Fraction] = alpha
    while richer:
        t = sum(richer.values(), Fraction(0)) / Fraction(X - (len(alpha) - len(richer)))
        above_one: dict[int, Fraction] = {replica_group: a for replica_group, a in richer.items() if a > t}
        if len(above_one) == len(richer):
            return shares | {replica_group: a / t for replica_group, a in richer.items()}
        richer = above_one
    return shares


@dataclass(frozen=True)
class Rebalancing:
    """Says when to move units, and where to. It keeps no state: all it goes by is the last epoch.

    `X`: units there are in all. `margin`: the part of the epoch's seconds that a move has to save.

    Why nothing swings: let ε be the relative noise of the seconds, and let a move from x to y be
    proposed for its predicted gain. Then max t(y)·(1−ε) < (1−margin)·(1+ε)·max t(x) for the true t. So with
    margin ≥ 2ε/(1+ε) every move makes the true max t_i smaller, and none is ever taken back. The default
    bears a noise of 5 %.
    """

    X: int
    min_gain: float = 0.1

    def __post_init__(self) -> None:
        if self.X < 1:
            raise UserError(f"{count_text(self.X, 'unit')}: there must be at least one")
        if not 0 <= self.min_gain < 1:
            raise UserError(f"margin {self.min_gain}: must be at least 0 and less than 1")

    def propose(
        self,
        seconds: Mapping[int, float],
        units: Mapping[int, int],
        cost: float = 0.0,
        ahead: float = 1.0,
    ) -> dict[int, int] | None:
        """The units of each living island from now on, or None where they stay as they are.

        `units`: x_i of each living island in its last epoch, 0 for one that had none; the dead are not in it.
        `seconds`: t_i, what island i computed in its last epoch, without the waiting at meetings. An island
        that is not in it has not been measured, and counts as the mean of those that have.
        Both are of the same epoch: of one in which units were moved midway there is nothing to go by but
        α_i itself, so give α_i/x_i for the x_i at its end.
        `cost`: seconds that a move holds everybody up. `ahead`: epochs to come that gain by it.

        A move has to gain more than the margin in an epoch, and more than the cost in all those ahead. Units
        that are free or promised twice, or an island that has none, are seen to whatever it costs.
        """
        for replica_group, x in units.items():
            if x < 0:
                raise UserError(f"island {replica_group}: {count_text(x, 'unit')}, must not be negative")
        if cost < 0 or ahead < 0:
            raise UserError(f"a cost of {cost} s, {ahead} epochs ahead: neither may be negative")
        alpha = _alpha(seconds, units)
        now, new = dict(units), shares(alpha, self.X) if alpha else {}
        if new == now:
            return None
        if sum(now.values()) != self.X or not all(now.values()):
            return new
        t_now, t_new = _longest(alpha, now), _longest(alpha, new)
        gain = t_now - t_new
        return new if gain > self.min_gain * t_now and gain * ahead > cost else None


def _alpha(seconds: Mapping[int, float], units: Mapping[int, int]) -> dict[int, float]:
    """α_i = t_i·x_i of the living; the mean of those known where it is not."""
    known = {
        replica_group: seconds[replica_group] * x
        for replica_group, x in units.items()
        if replica_group in seconds and x
    }
    usual = fmean(known.values()) if known else 1.0
    return {replica_group: known.get(replica_group, usual) for replica_group in units}


def _longest(alpha: Mapping[int, float], x: Mapping[int, int]) -> float:
    """max t_i, in seconds."""
    return max(alpha[replica_group] / x[replica_group] for replica_group in alpha)
