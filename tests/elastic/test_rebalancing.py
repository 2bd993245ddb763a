"""Rebalancing by Lemma 1: whole units, moved only for a gain, and a small version of the paper's figure 5."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from math import floor, inf, nan
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsgd.elastic.rebalancing import Rebalancing, shares
from hpcsgd.errors import UserError

alphas = st.dictionaries(
    st.integers(0, 20), st.floats(1e-3, 1e3) | st.integers(1, 1000), min_size=1, max_size=8
)
few = st.lists(st.integers(1, 1000), min_size=1, max_size=4).map(lambda a: dict(enumerate(a)))
NOISE = 0.05


def longest(alpha: Mapping[int, float], x: Mapping[int, float]) -> float:
    return max(alpha[replica_group] / x[replica_group] for replica_group in alpha)


def whole_shares(replica_groups: int, X: int) -> Iterator[dict[int, int]]:
    """Yield all ways to split X units among the groups, each with at least one."""
    for cuts in combinations(range(1, X), replica_groups - 1):
        ends = [0, *cuts, X]
        yield {
            replica_group: ends[replica_group + 1] - ends[replica_group]
            for replica_group in range(replica_groups)
        }


def spent(alpha: Mapping[int, float], t: float) -> float:
    """Return the units needed for a time of t with at least one for each: x_i = max(1, α_i/t)."""
    return sum(max(1, a / t) for a in alpha.values())


def lemma_1(alpha: Mapping[int, float], X: int) -> dict[int, float]:
    """Return x_i = max(1, α_i/t), with t found by bisection."""
    low, high = 0.0, sum(alpha.values())
    for _ in range(200):
        t = (low + high) / 2
        low, high = (t, high) if t == 0 or spent(alpha, t) > X else (low, t)
    return {replica_group: max(1, a / high) for replica_group, a in alpha.items()}


@given(alphas, st.integers(0, 300))
def test_every_unit_is_given_once_and_every_group_has_one(alpha: dict[int, float], free: int) -> None:
    X = len(alpha) + free
    x = shares(alpha, X)
    assert x.keys() == alpha.keys()
    assert sum(x.values()) == X
    assert min(x.values()) >= 1


@given(alphas, st.integers(1, 300))
def test_shares_are_those_of_lemma_1_within_one_unit(alpha: dict[int, float], free: int) -> None:
    X = len(alpha) + free
    x, exact = shares(alpha, X), lemma_1(alpha, X)
    plain = {replica_group: X * a / sum(alpha.values()) for replica_group, a in alpha.items()}
    if min(plain.values()) >= 1:
        assert exact == pytest.approx(plain)
    assert all(abs(x[replica_group] - exact[replica_group]) < 1 + 1e-6 for replica_group in alpha)


@given(few, st.integers(0, 12))
def test_one_unit_more_for_each_would_be_as_good_as_the_best(alpha: dict[int, int], free: int) -> None:
    X = len(alpha) + free
    best = min(longest(alpha, x) for x in whole_shares(len(alpha), X))
    x = shares(alpha, X)
    assert longest(alpha, {replica_group: x[replica_group] + 1 for replica_group in alpha}) <= best


def test_the_largest_remainder_is_rounded_up() -> None:
    assert shares({0: 2.2, 1: 3.2, 2: 4.6}, 10) == {0: 2, 1: 3, 2: 5}
    assert shares({0: 2.4, 1: 2.1, 2: 1.5}, 6) == {0: 2, 1: 2, 2: 2}


def test_ties_go_to_the_lowest_group() -> None:
    assert shares({7: 0.1, 3: 0.1, 5: 0.1}, 8) == {3: 3, 5: 3, 7: 2}


def test_no_group_is_left_without_a_unit() -> None:
    assert shares({0: 1e-300, 1: 1e-9, 2: 1.0, 3: 3.0}, 10) == {0: 1, 1: 1, 2: 2, 3: 6}
    assert shares({0: 1.0, 1: 1e308, 2: 1e308}, 3) == {0: 1, 1: 1, 2: 1}


@pytest.mark.parametrize(
    ("alpha", "X", "message"),
    [
        ({0: 1.0, 4: 0.0}, 8, "replica group 4: alpha = 0.0"),
        ({0: 1.0, 4: -1.0}, 8, "replica group 4: alpha = -1.0"),
        ({0: inf, 4: 1.0}, 8, "replica group 0: alpha = inf"),
        ({0: nan, 4: 1.0}, 8, "replica group 0: alpha = nan"),
        ({0: 1.0, 1: 1.0, 2: 1.0}, 2, "2 units for 3 replica groups"),
    ],
)
def test_what_cannot_be_shared(alpha: dict[int, float], X: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        shares(alpha, X)


def test_what_no_policy_can_be_and_no_epoch_was() -> None:
    for X, margin in ((0, 0.1), (8, -0.1), (8, 1.0), (8, nan)):
        with pytest.raises(UserError):
            Rebalancing(X, margin)
    for cost, ahead in ((-1.0, 1.0), (1.0, -1.0)):
        with pytest.raises(UserError, match="neither may be negative"):
            Rebalancing(8).propose({0: 1.0}, {0: 8}, cost, ahead)
    with pytest.raises(UserError, match="replica group 0: -1 units"):
        Rebalancing(8).propose({0: 1.0}, {0: -1})


@given(few, st.data())
def test_a_constant_alpha_is_reached_after_one_epoch(alpha: dict[int, int], data: st.DataObject) -> None:
    """From any start, max t is that of Lemma 1 with its shares rounded down, or less."""
    X = len(alpha) + data.draw(st.integers(0, 100))
    x = split(data, len(alpha), X)
    x = Rebalancing(X, min_gain=0.0).propose(epoch(alpha, x), x) or x
    rounded_down = {
        replica_group: max(1, floor(share - 1e-9)) for replica_group, share in lemma_1(alpha, X).items()
    }
    assert longest(alpha, x) <= longest(alpha, rounded_down) * (1 + 1e-9)


def test_a_move_has_to_gain_more_than_the_margin() -> None:
    seconds, units = {0: 1.0, 1: 1.5}, {0: 100, 1: 100}  # 1.5 s before, 1.25 s after: a gain of a sixth
    assert Rebalancing(200, min_gain=0.166).propose(seconds, units) == {0: 80, 1: 120}
    assert Rebalancing(200, min_gain=0.167).propose(seconds, units) is None


def test_a_move_has_to_gain_more_than_it_costs() -> None:
    policy, seconds, units = (
        Rebalancing(200),
        {0: 1.0, 1: 1.5},
        {0: 100, 1: 100},
    )  # a gain of 0.25 s per epoch
    assert policy.propose(seconds, units, cost=0.24) == {0: 80, 1: 120}
    assert policy.propose(seconds, units, cost=0.26) is None
    assert policy.propose(seconds, units, cost=2.6, ahead=10) is None
    assert policy.propose(seconds, units, cost=2.4, ahead=10) == {0: 80, 1: 120}
    assert policy.propose(seconds, units, ahead=0) is None


def test_what_the_dead_leave_goes_to_the_living_at_any_cost() -> None:
    policy = Rebalancing(12)
    seconds = {0: 1.0, 1: 1.0, 2: 2.0}
    assert policy.propose(seconds, {1: 4, 2: 4}, cost=inf) == {1: 4, 2: 8}
    assert policy.propose(seconds, {2: 4}, cost=inf) == {2: 12}
    assert policy.propose(seconds, {}) is None
    assert policy.propose(seconds, {2: 12}) is None


def test_who_returns_counts_as_an_average_group() -> None:
    policy = Rebalancing(12)
    assert policy.propose({0: 1.0, 1: 3.0}, {0: 6, 1: 6, 2: 0}, cost=inf) == {0: 2, 1: 6, 2: 4}
    assert policy.propose({0: 1.0, 1: 3.0}, {0: 6, 1: 6, 2: 6}, cost=inf) == {0: 2, 1: 6, 2: 4}
    assert policy.propose({0: 9.0, 1: 1.0}, {0: 0, 1: 12}) == {
        0: 6,
        1: 6,
    }  # the time of the dead group no longer counts
    assert policy.propose({}, {0: 12, 1: 0, 2: 0}) == {0: 4, 1: 4, 2: 4}


@pytest.mark.slow
@given(
    st.lists(st.floats(1, 20), min_size=2, max_size=8).map(lambda a: dict(enumerate(a))),
    st.booleans(),
    st.integers(0, 248),
    st.data(),
    st.randoms(use_true_random=False),
)
def test_noise_moves_nothing_back(
    alpha: dict[int, float], alike: bool, free: int, data: st.DataObject, chance: Random
) -> None:
    """Every move shortens the true time, so no split comes back."""
    alpha = dict.fromkeys(alpha, 1.0) if alike else alpha
    X = len(alpha) + free
    x, policy = split(data, len(alpha), X), Rebalancing(X)
    for _ in range(50):
        moved = policy.propose(epoch(alpha, x, chance), x)
        if moved is not None:
            assert longest(alpha, moved) < longest(alpha, x)
            x = moved


@pytest.mark.parametrize("alpha", [{0: 1.0, 1: 1.0}, {0: 1.0, 1: 3.0}, {i: 1.0 + (i % 4) for i in range(8)}])
def test_noise_moves_nothing_where_all_are_as_fast(alpha: dict[int, float]) -> None:
    x = shares(alpha, 320)
    assert longest(alpha, x) == pytest.approx(sum(alpha.values()) / 320)
    chance = Random(1)
    assert all(Rebalancing(320).propose(epoch(alpha, x, chance), x) is None for _ in range(1000))


def split(data: st.DataObject, replica_groups: int, X: int) -> dict[int, int]:
    """Return a random split with at least one unit for each group."""
    cuts = sorted(
        data.draw(
            st.lists(
                st.integers(0, X - replica_groups), min_size=replica_groups - 1, max_size=replica_groups - 1
            )
        )
    )
    ends = [0, *cuts, X - replica_groups]
    return {
        replica_group: 1 + ends[replica_group + 1] - ends[replica_group]
        for replica_group in range(replica_groups)
    }


def epoch(alpha: Mapping[int, float], x: Mapping[int, int], chance: Random | None = None) -> dict[int, float]:
    """Return the measured times t_i = α_i/x_i, with noise if `chance` is given."""
    noise = {replica_group: 1 + (chance.uniform(-NOISE, NOISE) if chance else 0) for replica_group in x}
    return {
        replica_group: alpha[replica_group] / x[replica_group] * noise[replica_group] for replica_group in x
    }


EPOCHS, X, SLOW, DEAD = 50, 256, range(5, 15), range(26, 34)


def figure_5(number: int) -> dict[int, float]:
    """Return α of the living groups in an epoch.

    Group 1 is slow for a while, and has all the data while group 0 is dead.
    """
    if number in DEAD:
        return {1: 2560.0}
    return {0: 1280.0, 1: 3840.0 if number in SLOW else 1280.0}


@pytest.mark.parametrize("noise", [None, 5])
def test_figure_5_of_the_paper(noise: int | None) -> None:
    chance = None if noise is None else Random(noise)
    policy, x, seconds, moves = Rebalancing(X), {0: 128, 1: 128}, {}, []
    for number in range(EPOCHS):
        alpha = figure_5(number)
        had = {replica_group: x.get(replica_group, 0) for replica_group in alpha}
        moved = policy.propose(seconds, had)
        if moved is not None:
            moves.append(number)
            x = moved
        seconds = epoch(alpha, x, chance)
        t = sum(alpha.values()) / X
        if number not in (SLOW.start, SLOW.stop):  # an epoch's times are known only after it
            assert longest(alpha, x) <= 1.15 * t
            if chance is None:
                assert all(
                    abs(x[replica_group] - X * alpha[replica_group] / sum(alpha.values())) < 1
                    for replica_group in alpha
                )
    assert moves == [SLOW.start + 1, SLOW.stop + 1, DEAD.start, DEAD.stop]
