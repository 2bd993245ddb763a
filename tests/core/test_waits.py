"""Tests of which ranks wait for which: every averager states it, and the schedule adds the period."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hpcsgd.core.averager import Traits
from hpcsgd.core.graphs import Ring
from hpcsgd.core.method import Method
from hpcsgd.core.step import Schedule
from hpcsgd.core.traits import ScheduleTraits
from hpcsgd.core.waits import All, InNeighbors, Pairs, RandomPartner, Slowest, Unknown, due, later
from hpcsgd.errors import UserError
from hpcsgd.methods.fedavg import PerEpoch
from hpcsgd.parts.averagers import Mean
from hpcsgd.parts.grad_reduces import AllToAll
from hpcsgd.parts.schedules import Every
from hpcsgd.parts.schedules.every import InTurn


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (Traits, "Traits: waits is missing, which says who waits for whom: hpcsgd.core.waits has All "),
        (lambda: Traits(vectors_only=True), "Traits: waits is missing, which says who waits for whom: "),
        (
            lambda: Traits(None),  # pyright: ignore[reportArgumentType]
            "Traits: waits = None: expected an All or a Living or ",
        ),
    ],
)
def test_an_averager_that_does_not_say_it_is_refused(make: Callable[[], Any], line: str) -> None:
    with pytest.raises(UserError) as told:
        make()
    assert str(told.value).startswith(line)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("schedule", "period"),
    [
        *((PerEpoch(x, S), None) for x, S in [(1, 1), (3, 8), (5, 7), (8, 8), (2, 6)]),
        *((InTurn(every, F), None) for every, F in [(1, 1), (4, 3), (7, 5), (6, 6), (6, 4)]),
        (Every(1), 1),
        (Every(5), 5),
    ],
    ids=str,
)
def test_the_period_says_after_which_steps_groups_synchronize(schedule: Any, period: int | None) -> None:
    waits = Method(AllToAll(), schedule, Mean()).waits
    assert isinstance(waits, All)
    assert waits.period is not None
    assert waits.period == (period or schedule.traits.spacing)
    steps = np.arange(1, 60)
    found = [schedule(SimpleNamespace(t=int(t))) for t in steps]
    assert [due(int(t), waits.period) for t in steps] == found
    assert due(steps, waits.period).tolist() == found


class WithoutEnd:
    """A schedule written by the user, of which nothing is known."""

    traits = ScheduleTraits()

    def __call__(self, s: Any) -> bool:
        return True


def test_a_schedule_that_cannot_tell_leaves_the_period_open() -> None:
    schedule: Schedule = WithoutEnd()
    assert Method(AllToAll(), schedule, Mean()).waits == All(period=None)


def test_what_is_used_later_is_waited_for_later() -> None:
    assert later(All(1, period=3), 2) == All(3, period=3)
    assert later(InNeighbors(Ring()), 1) == InNeighbors(Ring(), 1)
    assert later(Pairs(1, 4), 0) == Pairs(1, 4)
    for waits in (Slowest(2), RandomPartner(0)):
        assert isinstance(later(waits, 1), Unknown)
    assert later(Unknown("it rains"), 1) == Unknown("it rains")
