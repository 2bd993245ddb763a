"""The procedure, on groups with given distances; invalid input; memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpcsgd.comm import threads
from hpcsgd.errors import UserError
from hpcsgd.performance.probing import memory
from hpcsgd.performance.probing.probe import Plan, Probe, probe
from hpcsgd.performance.probing.replicas import DivergedError
from hpcsgd.performance.probing.report import answer, table_row, to_json
from hpcsgd.train.growth import COMPARED, Verdict


class Scripted:
    """A replacement of `VirtualGroups`: D is given for each P, at every synchronization."""

    def __init__(self, P: int, D: float, loss: float = 1.0, unrest: int = 0) -> None:
        self.P = P
        self.trainees = [Scripted.trainee]
        self._D, self._loss, self._unrest = D, loss, unrest
        self._trained = 0
        self.syncs = 0
        self._settled = False

    class trainee:
        @staticmethod
        def tensors() -> Iterator[torch.Tensor]:
            yield torch.zeros(1)

    def train(self, steps: int) -> float:
        self._trained += steps if self.P == 1 else 1
        if math.isnan(self._D) and self._trained == 3:
            raise DivergedError(f"the loss with {self.P} groups is nan")
        return 0.0

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """Yield a model whose weight is the number of steps that it was trained as a single group."""
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, self._trained)
        yield model

    def start_from(self, state: Mapping[str, Tensor]) -> None:
        assert state["weight"].item() == SETTLE
        self._settled = True

    def synchronize(self) -> float:
        assert self._settled
        self._unrest -= 1
        self.syncs += 1
        return 1.0 if math.isnan(self._D) else self._D * 2 ** max(self._unrest, 0)

    def loss(self) -> float:
        return self._loss


SETTLE = 7


def a_plan(**given: Any) -> Plan:
    return Plan(**{"sync_every": 8, "batch_size": 128, "lr": 0.1, "cap": 30, "settle": SETTLE, **given})


def probed(
    D: dict[int, float],
    *,
    ranks: int = 1,
    losses: dict[int, float] | None = None,
    unrest: Mapping[int, int] | None = None,
    kind: type[Scripted] = Scripted,
    **given: Any,
) -> Probe:
    def start(P: int, seed: int, world: Any) -> Any:
        assert world.size == min(P, ranks)
        assert world.rank < P
        return kind(P, {1: 0, **D}[P], (losses or {}).get(P, 1.0), (unrest or {}).get(P, 0))

    results = threads.run(ranks, lambda world: probe(start, a_plan(**given), world))
    assert all(result == results[0] or result.verdict == results[0].verdict for result in results)
    return results[0]


PAPER = {2: 0.85, 4: 1.95, 8: 3.2, 16: 3.2, 32: 3.2}


@pytest.mark.parametrize("ranks", [1, 3])
def test_it_stops_when_the_answer_cannot_change(ranks: int) -> None:
    result = probed(PAPER, ranks=ranks)
    assert [row.P for row in result.rows] == [2, 4, 8]
    assert result.verdict.P == 4
    assert answer(result) == "P = 4: at 8 the distance falls behind (ρ = 0.82 < 0.87)"


def test_every_P_goes_on_for_as_long_as_it_and_its_neighbours_need() -> None:
    shortest = a_plan().ramp + COMPARED

    def num_syncs(**given: Any) -> list[int]:
        return [len(row.distances[0]) for row in probed(PAPER, **given).rows]

    assert num_syncs() == [shortest] * 3
    assert num_syncs(unrest={2: 12}) == [11 + COMPARED] * 3
    assert num_syncs(unrest={4: 12}) == [11 + COMPARED] * 3
    assert num_syncs(unrest={8: 12}) == [shortest, 11 + COMPARED, 11 + COMPARED]


class Falling(Scripted):
    """D falls to a tenth after the tenth synchronization for every P; that of 4 groups rises until then."""

    def synchronize(self) -> float:
        D = super().synchronize()
        return D / 10 if self.syncs > 10 else D * 1.3 ** (self.syncs * (self.P == 4))


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_falls_for_all_is_not_taken_for_groups_that_fall_behind(ranks: int) -> None:
    """D grows in proportion to P where both are flat; before D falls, only that of P = 2 is flat."""
    result = probed({2: 1, 4: 2}, ranks=ranks, groups=(2, 4), seeds=(1, 2), kind=Falling)
    assert [len(d) for row in result.rows for d in row.distances] == [14] * 4
    assert result.growths[0].rho == 1
    assert answer(result).startswith("P = 4 or more")


def test_the_smaller_is_charged_for_going_on() -> None:
    row = probed(PAPER, unrest={4: 12}).rows[0]
    assert row.samples == (a_plan().ramp + COMPARED + 11 + COMPARED) * 8 * 128 * 2


def test_where_the_smaller_diverges_as_it_goes_on() -> None:
    """A P that seemed fine at first is too large itself if it diverges later."""

    class Late(Scripted):
        def synchronize(self) -> float:
            if too_many == self.P and self.syncs >= 10:
                raise DivergedError(f"the loss with {self.P} groups is nan")
            return super().synchronize()

    too_many = 4
    result = probed({2: 1, 4: 2, 8: 4}, unrest={8: 12}, kind=Late)
    assert [row.P for row in result.rows] == [2, 4]
    assert answer(result) == "P = 2: with 4 groups the training diverged"
    too_many = 2
    with pytest.raises(UserError, match="the loss with 2 groups is nan"):
        probed({2: 1, 4: 2}, unrest={4: 12}, kind=Late)


def test_the_cap() -> None:
    assert {len(row.distances[0]) for row in probed(PAPER, unrest={2: 100}, cap=13).rows} == {13}


def test_seeds() -> None:
    assert [len(row.distances) for row in probed(PAPER, seeds=(1, 2, 3)).rows] == [3, 3, 3]


def test_the_rate_and_the_samples_of_a_row() -> None:
    row = probed(PAPER, rule="root").rows[1]
    assert row.lr == pytest.approx(0.2)
    assert row.samples == len(row.distances[0]) * 8 * 128 * 4


def test_all_samples_count() -> None:
    result = probed(PAPER, seeds=(1, 2))
    assert result.samples == 2 * SETTLE * 128 + sum(row.samples for row in result.rows)
    assert result.seconds >= sum(row.seconds for row in result.rows)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_P_that_diverges_is_too_large(ranks: int) -> None:
    result = probed({2: 1, 4: 2, 8: math.nan}, ranks=ranks, seeds=(1, 2))
    assert [row.P for row in result.rows] == [2, 4, 8]
    assert result.verdict == Verdict(4, None, final=True)
    assert answer(result) == "P = 4: with 8 groups the training diverged"
    assert table_row(result).endswith("diverged after 2 synchronizations: the loss with 8 groups is nan")
    row = to_json(result, {})["rows"][2]
    assert (row["diverged"], row["distances"]) == ("the loss with 8 groups is nan", [[1.0, 1.0]])


def test_where_already_the_smallest_diverges() -> None:
    with pytest.raises(UserError, match="the loss with 2 groups is nan"):
        probed({2: math.nan})


def test_an_open_end() -> None:
    result = probed({2: 1, 4: 2}, groups=(2, 4))
    assert answer(result) == "P = 4 or more: D still grew with P at the largest that was probed"


def test_the_second_evidence_is_heard() -> None:
    assert probed(PAPER, losses={2: 1.0, 4: 0.9}).objection() is None
    objection = probed(PAPER, losses={2: 1.0, 4: 1.2}).objection()
    assert objection is not None
    assert "the loss of P = 4 is 1.2, that of P = 2 is 1: fewer groups" in objection


def test_json_holds_the_numbers() -> None:
    found = to_json(probed(PAPER), {"data": "x"})
    assert (found["P"], found["unclear"], found["final"]) == (4, None, True)
    assert found["setting"] == {"data": "x"}
    assert [g["to"] for g in found["growths"]] == [4, 8]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"groups": (4, 2)}, r"groups = \[4, 2\]: expected growing numbers"),
        ({"groups": (2, 2)}, "expected growing numbers"),
        ({"groups": (1,)}, "at least two numbers of groups from 2 on"),
        ({"groups": (1, 2)}, "at least two numbers of groups from 2 on"),
        ({"cap": 5}, "cap = 5: at least ramp"),
    ],
)
def test_what_cannot_be_answered(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        a_plan(**given)


def test_models_that_do_not_move() -> None:
    with pytest.raises(UserError, match="D = 0 with 2 groups: their models stay equal"):
        probed({2: 0.0})


def test_models_that_do_not_fit() -> None:
    def ask(world: Any) -> None:
        memory.require_room(3 * 2**20, (2, 4, 8), 10 * 2**20, world)

    with pytest.raises(UserError, match=r"4 models of 3 MiB, .*: up to 3 groups do; or give more ranks"):
        threads.run(1, ask)
