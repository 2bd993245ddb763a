"""Rebalancing: slow replica groups get more compute, and lost groups' compute goes to living groups.

EnsembleSync (papers/ensemblesync.txt), section 3.2. With x_i units of compute, group i needs t_i = α_i/x_i
seconds for an epoch. So α_i = t_i·x_i can be estimated from the last epoch. All groups have Σ x_i = X units
(the paper's budget B). Lemma 1: the longest t_i is smallest if all t_i are the same, namely

    t* = Σ α_j / X,   x_i* = X·α_i / Σ α_j.

A unit is anything that can be moved: a rank of the group, a CPU thread of each rank, or a sample of the
micro-batch, which stands for the paper's GPU memory. This module only decides what to move. Differences from
the paper:

- Units are whole, and each group keeps at least one, because with none it would never finish. Under x_i ≥ 1
  the lemma reads x_i = max(1, α_i/t) with t such that the sum is X; `shares` rounds that.
- The paper moves units after every epoch. Here a move must be worth it: see `Rebalancing`.
- A group that returns has no last epoch, so its α_i is the mean of the others. In the paper it begins with
  its old estimate and approaches the equilibrium slowly; here it reaches the equilibrium after the first
  epoch that it finishes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import floor, isfinite
from statistics import fmean

from hpcsgd.errors import UserError, count_text


def shares(alpha: Mapping[int, float], X: int) -> dict[int, int]:
    """Divide `X` whole units among groups by Lemma 1; return the units x_i ≥ 1 of each group, whose sum is X.

    `alpha` has α_i, the seconds of an epoch with one unit, for each group. The exact x_i* are rounded by
    largest remainder, and change by less than one unit; of equal remainders the lowest group comes first.
    Other whole numbers may be better. But with one more unit for every group, the slowest group would be at
    least as fast as with the best ones. Raises `UserError` if there are fewer units than groups, or if an α
    is not a positive number.

    >>> shares({0: 1.0, 1: 3.0}, 256)
    {0: 64, 1: 192}
    """
    for replica_group, a in alpha.items():
        if not (isfinite(a) and a > 0):
            raise UserError(f"replica group {replica_group}: alpha = {a}, must be positive and finite")
    if len(alpha) > X:
        raise UserError(
            f"{count_text(X, 'unit')} for {count_text(len(alpha), 'replica group')}: each needs at least one"
        )
    exact = _lemma_1({replica_group: Fraction(a) for replica_group, a in sorted(alpha.items())}, X)
    x = {replica_group: floor(share) for replica_group, share in exact.items()}
    by_remainder = sorted(
        x, key=lambda replica_group: x[replica_group] - exact[replica_group]
    )  # stable: equal remainders in the order of groups
    for replica_group in by_remainder[: X - sum(x.values())]:
        x[replica_group] += 1
    return x


def _lemma_1(alpha: Mapping[int, Fraction], X: int) -> dict[int, Fraction]:
    """Return x_i* = max(1, α_i/t*) by group, with t* such that Σ x_i* = X.

    The values are exact fractions, so that equal remainders compare equal.
    """
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
    """The rule that decides when and where to move units. It keeps no state, and uses the last epoch only.

    `X`: the number of units of all groups together. `min_gain`: the fraction of an epoch's seconds that a
    move has to save.

    Why units do not move back and forth: let ε be the relative noise of the measured seconds, and let a move
    from the units x to the units y be proposed for its predicted gain. Then max t(y)·(1−ε) <
    (1−min_gain)·(1+ε)·max t(x) for the true t. So with min_gain ≥ 2ε/(1+ε) every move makes the true max t_i
    smaller, and none is ever reversed. The default tolerates a noise of 5 %.
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
        """Return how many units each living group has from now on, or None if no unit moves.

        `units`: x_i of each living group in its last epoch, 0 if it had none; lost groups are left out.
        `seconds`: t_i, the seconds that group i computed in its last epoch, without waiting for other groups.
        A group without an entry has not been measured, and counts as the mean of the others. `units` and
        `seconds` must be of the same epoch. If units moved during that epoch, give α_i/x_i for the x_i at its
        end. `cost`: seconds by which a move delays every group. `ahead`: the number of remaining epochs, all
        of which gain by a move.

        A move has to gain more than `min_gain` in an epoch, and more than `cost` in all epochs ahead. If Σ
        x_i is not X, or a group has no units, units move at any cost.
        """
        for replica_group, x in units.items():
            if x < 0:
                raise UserError(
                    f"replica group {replica_group}: {count_text(x, 'unit')}, must not be negative"
                )
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
    """Return α_i = t_i·x_i for each group in `units`; if t_i or x_i is missing, the mean of the others."""
    known = {
        replica_group: seconds[replica_group] * x
        for replica_group, x in units.items()
        if replica_group in seconds and x
    }
    usual = fmean(known.values()) if known else 1.0
    return {replica_group: known.get(replica_group, usual) for replica_group in units}


def _longest(alpha: Mapping[int, float], x: Mapping[int, int]) -> float:
    """Return max t_i, the seconds of an epoch of the slowest group, if the groups have `x` units."""
    return max(alpha[replica_group] / x[replica_group] for replica_group in alpha)
