"""How the coordinator's resource budget is shared when samples are assigned."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hpcsgd.cluster.launch.run import budget_of
from hpcsgd.config.schema import RebalanceSection
from hpcsgd.elastic.register import Member, Phase, Point, Register
from hpcsgd.elastic.resource_budget import ResourceBudget


def register(*ranks: int, units: tuple[tuple[int, int], ...] = (), epoch: int = 1) -> Register:
    members = tuple(Member(i, ("a:1",) * n, 3) for i, n in enumerate(ranks) if n)
    return Register(1, 3, phase=Phase.RUN, members=members, units=units, place=Point(10, epoch, 0))


def budget(unit: str, total: int = 1, cost: float = 0.0) -> ResourceBudget:
    return ResourceBudget(unit, total, min_gain=0.1, cost=cost, epochs=11)


def test_all_have_the_same_at_the_start() -> None:
    assert budget("threads", 8).units(register(1, 1, epoch=0), {}) == {0: 4, 1: 4}


def test_the_slow_get_more() -> None:
    now = register(1, 1, units=((0, 8), (1, 8)))
    assert budget("samples", 16).units(now, {0: 1.0, 1: 3.0}) == {0: 4, 1: 12}
    assert budget("samples", 16).units(now, {0: 1.0, 1: 1.05}) is None


def test_the_living_have_what_the_dead_had() -> None:
    now = register(1, 0, 1, units=((0, 4), (1, 4), (2, 4)))
    assert budget("threads", 12).units(now, {0: 1.0, 2: 1.0}) == {0: 6, 2: 6}


def test_ranks_are_those_that_the_living_have() -> None:
    """The ranks of dead groups are gone with their nodes."""
    assert budget("ranks").units(register(4, 0, 4), {0: 1.0, 2: 3.0}) == {0: 2, 2: 6}
    assert budget("ranks").units(register(4, 0, 4), {0: 1.0, 2: 1.0}) is None


def test_a_move_of_ranks_has_to_pay() -> None:
    now = register(4, 4)  # 10 epochs remain, each of them faster by 1 s
    assert budget("ranks", cost=9).units(now, {0: 1.0, 1: 3.0}) == {0: 2, 1: 6}
    assert budget("ranks", cost=11).units(now, {0: 1.0, 1: 3.0}) is None


def test_no_move_pays_after_the_last_epoch() -> None:
    """Samples are assigned once more after it, when no epoch is left that could be faster."""
    now = register(4, 4, epoch=11)
    assert budget("ranks", cost=0.5).units(now, {0: 1.0, 1: 3.0}) is None


@pytest.mark.parametrize(
    ("section", "total", "cost"),
    [
        (RebalanceSection(resource="ranks"), 1, 20.0),
        (RebalanceSection(resource="ranks", cost_s=3.0), 1, 3.0),
        (RebalanceSection(resource="samples", total=64), 64, 0.0),
    ],
)
def test_what_a_move_costs(section: RebalanceSection, total: int, cost: float) -> None:
    config: Any = SimpleNamespace(rebalance=section, training=SimpleNamespace(epochs=3))
    assert budget_of(config) == ResourceBudget(section.resource, total, 0.1, cost, 3)
    config.rebalance = RebalanceSection()
    assert budget_of(config) is None
