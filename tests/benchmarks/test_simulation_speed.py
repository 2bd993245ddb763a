"""Whom `simulation_speed.py` times."""

from __future__ import annotations

import pytest

from hpcsgd.simulation import RULES
from simulation_speed import measured


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_runs(rule):
    assert measured(rule, N=16, K=4, T=8)["simulated_seconds"] > 0
