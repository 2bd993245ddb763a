"""What groups tell each other before they average, and which parts of the model they then average."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from torch import Tensor

from hpcsgd.elastic.contribution import ALL_PARTS, NO_OPINION, Facts, facts_of, own_row
from hpcsgd.elastic.register import Member, Phase, Register

LATE, NEW = 2, 3
ROUND = Register(
    generation=2, rounds=4, began=4, phase=Phase.RUN, sharing=(0, 1, LATE),
    members=(
        Member(0, ("",), 4), Member(1, ("",), 4), Member(LATE, ("",), 2, late=True), Member(NEW, ("",), 0)
    ),
)  # fmt: skip
"""The round in which a late group returns, and a new one joins."""


class Parts:
    """What a group adds that has changed two parts of the model, and would average the second one."""

    norms: Sequence[float] = (3.0, 5.0)
    weights: Sequence[float] = (7.0, 0.5)
    shared: Sequence[Tensor] = ()
    late_rounds = 2

    def __init__(self, part: int | None = 1) -> None:
        self.part = part

    def __call__(self, facts: Facts, newest: Sequence[Tensor] = ()) -> Sequence[Tensor]:
        return []


def rows(here: Register, **told: bool) -> dict[int, list[float]]:
    """Return the rows of all members of `here`; group `LATE` has another part in mind than the others."""
    given = {"stops": False, "saves": False, **told}
    return {g: own_row(Parts(0 if g == LATE else 1), g, 7, here, **given) for g in here.replica_groups}


def test_groups_that_have_missed_no_round_choose_the_part() -> None:
    found = rows(ROUND)
    assert [row[-1] for row in found.values()] == [2, 2, NO_OPINION, NO_OPINION]
    facts = facts_of(found, ROUND, 2)
    assert (facts.part, facts.t, list(facts.norms)) == (1, 7, [0, 1, LATE])
    assert found[NEW][:2] == [0.0, 0.0]
    assert facts.norms[LATE] == [3.0, 5.0]
    assert facts.weights == {g: [7.0, 0.5] for g in (0, 1, LATE)}


@pytest.mark.parametrize("sharing", [(0, 1), (1,)])
def test_all_parts_are_averaged_where_a_late_group_has_no_samples(sharing: tuple[int, ...]) -> None:
    """It counts in this round only: what it learned in other parts could not count later."""
    here = replace(ROUND, sharing=sharing)
    found = rows(here)
    assert found[LATE][-1] == ALL_PARTS
    assert facts_of(found, here, 2).part is None
    in_later_rounds = replace(here, rounds=5)
    assert LATE not in in_later_rounds.counting
    assert facts_of(rows(in_later_rounds), in_later_rounds, 2).part == 1


@pytest.mark.parametrize(("told", "needing"), [("stops", (0, 1, LATE, NEW)), ("saves", (0, 1))])
def test_all_parts_are_averaged_where_a_group_stops_or_saves(told: str, needing: tuple[int, ...]) -> None:
    found = rows(ROUND, **{told: True})
    assert tuple(g for g, row in found.items() if row[-1] == ALL_PARTS) == needing
    assert facts_of(found, ROUND, 2).part is None
