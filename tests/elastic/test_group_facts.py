"""Replica groups with different models or methods get an error before they average."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hpcsgd
from elastic.conftest import TOKEN, Desk
from elastic.test_elastic_average import replica_groups
from elastic.test_outer_ensemble import Moved
from hpcsgd.comm import Communicator
from hpcsgd.comm.alike import Fact
from hpcsgd.elastic.elastic_average import ElasticAverage
from hpcsgd.engine.alike import facts_of_groups
from hpcsgd.errors import JobError
from hpcsgd.parts.averagers import NESTEROV, PseudoGradientPenalty, RadialDirectional
from references import vector

RANKS = (1, 2, 1)
OUTER = {"outer": NESTEROV}
WEIGHTED = OUTER | {"tokens_per_step": 2.0}
UNLIKE: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {},
        OUTER,
        "the method's averager is ElasticMean on replica groups 0, 1 and OuterElasticMean",
    ),
    (OUTER, WEIGHTED, "averager.tokens_per_step is None on replica groups 0, 1 and given on replica group 2"),
    (OUTER, OUTER | {"guard": PseudoGradientPenalty()}, "averager.inner is MeanFrom on replica groups 0, 1"),
    (
        OUTER | {"guard": PseudoGradientPenalty()},
        OUTER | {"guard": PseudoGradientPenalty(threshold=2.0)},
        "threshold is 3.0 on replica groups 0, 1 and 2.0 on replica group 2",
    ),
    (OUTER, OUTER | {"merge": RadialDirectional()}, "averager.inner is MeanFrom"),
    (
        OUTER,
        OUTER | {"num_fragments": 2},
        "averager is OuterElasticMean on replica groups 0, 1",
    ),
    (
        {},
        {"dtype": torch.float32},
        "parameter 0.weight is of shape (7, 5) and torch.float64",
    ),
]
JOINED = (
    "replica groups 0 and 2 differ: the method's averager.tokens_per_step is None on replica groups 0, 1 and "
    "given on replica group 2: give all groups the same"
)


def moved(group: Communicator, alive: ElasticAverage, **how: Any) -> Moved:
    return Moved(group, alive, **{"dtype": torch.float64, "sync_every": 2, **how})


@pytest.mark.parametrize(("most", "last", "told"), UNLIKE)
def test_what_differs_is_named_in_all_groups(
    desk: Desk, most: dict[str, Any], last: dict[str, Any], told: str
) -> None:
    def body(g: int, group: Communicator, alive: ElasticAverage) -> tuple[str, bool]:
        mine = moved(group, alive, **(last if g == 2 else most))
        start = vector(mine.net).clone()
        with pytest.raises(JobError) as refused:
            mine.optimizer.average_models()
        return str(refused.value), torch.equal(vector(mine.net), start)

    with desk.coordinator(3) as at:
        found = [each for of_group in replica_groups(at, RANKS, body) for each in of_group]
    assert len(set(found)) == 1
    message, is_unchanged = found[0]
    assert message.startswith("replica groups 0 and 2 differ: ")
    assert told in message
    assert message.endswith("give all groups the same")
    assert is_unchanged


@pytest.mark.parametrize("num_fragments", [1, 2])
def test_each_group_has_its_own_tokens_and_optimizer(desk: Desk, num_fragments: int) -> None:
    def body(g: int, group: Communicator, alive: ElasticAverage) -> int:
        how = {"tokens_per_step": 1.0 + g, "num_fragments": num_fragments}
        mine = moved(group, alive, **OUTER, **how)
        mine.optimizer.param_groups[0]["lr"] = 1.0 + g
        mine.optimizer.average_models()
        return alive.rounds

    with desk.coordinator(3) as at:
        assert replica_groups(at, RANKS, body) == [[1], [1, 1], [1]]


def test_the_others_go_on_without_a_group_that_returns_with_something_else(desk: Desk) -> None:
    """It would hold them up otherwise."""
    refused = threading.Event()
    is_last: list[bool] = []
    both = threading.Barrier(2, lambda: is_last.append(refused.is_set()), timeout=30)

    def body(g: int, group: Communicator, alive: ElasticAverage) -> list[int]:
        mine = moved(group, alive, **OUTER)
        mine.optimizer.average_models()
        if g == 2:
            alive.close()
            again = ElasticAverage(2, group, at.address, TOKEN, "127.0.0.1", timeout=30)
            try:
                with pytest.raises(JobError) as error:
                    moved(group, again, **WEIGHTED).optimizer.average_models()
            finally:
                again.close()
                refused.set()
            assert str(error.value) == JOINED
            return []
        while not (is_last and is_last[-1]):
            mine.optimizer.average_models()
            both.wait()
        mine.optimizer.average_models()
        return list(alive.members)

    with desk.coordinator(3) as at:
        assert replica_groups(at, (1, 1, 1), body) == [[[0, 1]], [[0, 1]], [[]]]


def test_the_facts_of_a_script_are_those_of_its_model_and_averager() -> None:
    made = {name: hpcsgd.ensemble_sync(2, **how) for name, how in {"plain": {}, "weighted": WEIGHTED}.items()}
    assert made["weighted"].averager.traits.own_settings == ("tokens_per_step",)
    assert made["plain"].averager.traits.own_settings == ()


def test_the_facts_include_over_how_many_ranks_a_model_is_sharded() -> None:
    """Groups with and without FSDP would average different elements with each other."""

    def found(ranks: int | None) -> list[Fact]:
        net, method = torch.nn.Linear(2, 1), hpcsgd.ensemble_sync(2)
        if ranks is not None:  # a parameter as torch's FSDP makes it
            vars(net.weight).update(placements=(), device_mesh=SimpleNamespace(size=lambda: ranks))
        return facts_of_groups(net, net.named_parameters(), method)

    first = [found(ranks)[0] for ranks in (None, 1, 2)]
    assert first == [("FSDP", "off"), ("FSDP", "over 1 rank"), ("FSDP", "over 2 ranks")]
    assert found(2)[1:] == found(None)[1:]
