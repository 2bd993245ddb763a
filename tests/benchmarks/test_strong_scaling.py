"""The contestants of `strong_scaling.py`, and the times that are predicted for them."""

from __future__ import annotations

import pytest

from step_time.networks import Compute
from strong_scaling.places import BITS, COMPUTE, LATE, LOCAL, OURS, RANKS, SYNC, hosts, network, places
from strong_scaling.prediction import predicted


@pytest.mark.parametrize("N", RANKS)
def test_all_ranks_have_a_place(N):
    assert {place.P * place.K for place in places(N)} == {N}


def test_with_fewer_ranks_than_groups_all_are_synchronous():
    local = {N: {place.figure for place in places(N) if place.who in LOCAL} for N in RANKS}
    assert local == {
        1: set(),
        2: set(),
        4: {"figure 5"},
        8: {"figure 5", "figure 9"},
        16: {"figure 5", "figure 9"},
    }


def test_one_rank_is_predicted_to_compute_alone():
    [alone] = places(1)
    assert predicted(alone, COMPUTE) == pytest.approx(COMPUTE)


def test_predicted_synchronizations_need_what_the_link_needs():
    """16 ranks form 8 groups of 2 on 8 hosts. Every 4 steps a host sends 2·7/8 of the model."""
    of = {(place.who, place.figure): place for place in places(16)}
    model = 4 * sum(p.numel() for p in network(Compute(0.0)).parameters())
    bound = 2 * 7 / 8 * model * 8 / BITS
    assert hosts(16) == 8
    sync_seconds = 4 * (predicted(of[OURS, "figure 9"], 1.0) - 1.0)
    assert bound < sync_seconds < 1.3 * bound
    assert predicted(of[LATE, "figure 9"], 1.0) == pytest.approx(1.0, abs=0.02)
    assert predicted(of[SYNC, ""], 1.0) > 1.0
