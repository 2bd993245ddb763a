"""The methods that `simulation_speed.py` times."""

from __future__ import annotations

import pytest

from simulation_speed import METHODS, measured


@pytest.mark.parametrize("method", METHODS)
def test_every_rule_runs(method):
    assert measured(method, N=16, K=4, T=8)["simulated_seconds"] > 0
