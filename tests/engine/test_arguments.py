"""Arguments in the wrong place or of the wrong kind are reported in one line that names them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.utils.data import IterableDataset

import hpcsgd
from hpcsgd import DistributedOptimizer, UserError, bsp
from hpcsgd.comm import Communicator
from hpcsgd.core.topology import form
from references import model as make_model

CALL = "expected DistributedOptimizer(optimizer, model, topology, method)"
JOB = "expected what hpcsgd.init(groups=…) returns"
MADE = "expected a Method, which a call makes: did you mean"
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "its name": (
        {"method": "hierarchical"},
        f"method = 'hierarchical': {MADE} hpcsgd.hierarchical(sync_every=…)?",
    ),
    "near its name": ({"method": "diloko"}, f"method = 'diloko': {MADE} hpcsgd.diloco(sync_every=…)?"),
    "no call": (
        {"method": hpcsgd.hierarchical},
        f"method = hierarchical: {MADE} hpcsgd.hierarchical(sync_every=…)?",
    ),
    "no call of bsp": ({"method": bsp}, f"method = bsp: {MADE} hpcsgd.bsp()?"),
    "no method": (
        {"method": None},
        "method = None: expected a Method, as hpcsgd.ad_psgd() makes it; allowed: ad_psgd, ",
    ),
    "a part of one": (
        {"method": hpcsgd.TopK(0.5)},
        "method = an object of type TopK: expected a Method, as hpcsgd.ad_psgd() makes it; allowed: ad_psgd",
    ),
    "no topology": ({"topology": None}, f"topology = None: {JOB}"),
    "its number of groups": ({"topology": 4}, f"topology = 4: {JOB}"),
    "parameters": (
        {"model": [nn.Parameter(torch.zeros(1))]},
        "model = an object of type list: expected the torch.nn.Module itself",
    ),
    "a class": (
        {"optimizer": optim.SGD},
        "optimizer = SGD: expected a torch optimizer that has been made, as torch.optim.SGD(",
    ),
}


def given() -> dict[str, Any]:
    net = make_model()
    return {"optimizer": optim.SGD(net.parameters(), 0.1), "model": net, "method": bsp()}


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(("wrong", "line"), CASES.values(), ids=list(CASES))
def test_an_argument_of_another_kind_is_named(run, n: int, wrong: dict[str, Any], line: str) -> None:
    def refused(world: Communicator) -> str:
        with pytest.raises(UserError) as error:
            DistributedOptimizer(**{**given(), "topology": form(world), **wrong})
        return str(error.value)

    for told in run(n, refused):
        assert told.startswith(f"DistributedOptimizer: {line}")
        assert "\n" not in told


@pytest.mark.ranks(2)
def test_arguments_in_another_order_are_reported(run) -> None:
    def refused(world: Communicator) -> tuple[str, str]:
        topology, right = form(world), given()
        with pytest.raises(UserError) as optimizer_and_model:
            DistributedOptimizer(right["model"], right["optimizer"], topology, bsp())
        with pytest.raises(UserError) as job_and_method:
            DistributedOptimizer(right["optimizer"], right["model"], bsp(), topology)  # pyright: ignore[reportArgumentType]
        return str(optimizer_and_model.value), str(job_and_method.value)

    for told in run(2, refused):
        assert told == (
            f"optimizer and model are swapped: {CALL}",
            f"topology and method are swapped: {CALL}",
        )


@pytest.mark.ranks(2)
def test_the_first_of_two_optimizers_of_one_model_reports_the_second(run) -> None:
    def refused(world: Communicator) -> str:
        topology, net = form(world), make_model()
        first, second = (
            DistributedOptimizer(optim.SGD(net.parameters(), 0.1), net, topology, bsp()) for _ in range(2)
        )
        second.step()
        with pytest.raises(UserError) as error:
            first.step()
        return str(error.value)

    for told in run(2, refused):
        assert told.startswith("another DistributedOptimizer, made after this one, trains parameter ")
        assert told.endswith("wrap several optimizers of one model together, as hpcsgd.ChainedOptimizer")


class Lines(IterableDataset[int]):
    def __iter__(self):
        return iter([1])


@pytest.mark.ranks(2)
def test_what_a_sampler_cannot_sample_from_is_named(run) -> None:
    def refused(world: Communicator) -> list[str]:
        topology, found = form(world), []
        wrong: list[tuple[Any, Any]] = [
            (Lines(), topology),
            (iter([1]), topology),
            ([1, 2], None),
            (topology, [1, 2]),
        ]
        for data, place in wrong:
            with pytest.raises(UserError) as error:
                hpcsgd.Sampler(data, place)
            found.append(str(error.value))
        return found

    for lines, iterator, no_job, swapped in run(2, refused):
        assert lines.startswith("Sampler: data = an object of type Lines: expected a dataset with a length")
        assert iterator.startswith("Sampler: data = an object of type list_iterator: expected a dataset with")
        assert no_job == f"Sampler: topology = None: {JOB}"
        assert swapped == "data and topology are swapped: expected Sampler(data, topology)"
