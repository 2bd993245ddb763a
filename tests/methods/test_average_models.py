"""`average_models()` between two steps, for every method that has a reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn, optim

import hpcsgd
from hpcsgd.comm import Communicator
from hpcsgd.core.topology import Topology
from hpcsgd.engine.optimizer import DistributedOptimizer
from methods.table import REFERENCES
from references import model, one_step, vector

STEPS = 3
SAVED = [label for label, case in REFERENCES.items() if case.method != "ensemble_sync"]
"""The methods whose optimizers `hpcsgd.save` takes: of groups that may die, `hpcsgd train` saves them."""


def of_method(
    world: Communicator, method: str, P: int, seed: int = 0, lr: float = 0.1
) -> tuple[nn.Module, DistributedOptimizer, Topology]:
    case, net = REFERENCES[method], model(seed)
    topology = case.form(world, P)
    inner = optim.SGD(net.parameters(), lr=lr)
    return net, DistributedOptimizer(inner, net, topology, case.new()), topology


@pytest.mark.parametrize("method", SAVED)
@pytest.mark.parametrize(("P", "K"), [(2, 1), (2, 2)])
def test_after_a_load_it_is_as_without_one(run, tmp_path: Path, method: str, P: int, K: int) -> None:
    def both(world: Communicator) -> list[tuple[Tensor, Tensor]]:
        net, optimizer, topology = of_method(world, method, P)
        for t in range(STEPS):
            one_step(net, optimizer, topology, t)
        hpcsgd.save(tmp_path / "saved", optimizer)
        resumed, other, _ = of_method(world, method, P, seed=1)
        hpcsgd.load(tmp_path / "saved", other)

        def go_on(net: nn.Module, optimizer: DistributedOptimizer) -> list[Tensor]:
            optimizer.average_models()
            found = [vector(net)]
            for t in range(STEPS, STEPS + 2):
                one_step(net, optimizer, topology, t)
                found.append(vector(net))
            return found

        return list(zip(go_on(net, optimizer), go_on(resumed, other), strict=True))

    exact = {"rtol": 0, "atol": 0 if REFERENCES[method].same_bits else 1e-12}
    for pairs in run(P * K, both):
        for whole, resumed in pairs:
            torch.testing.assert_close(resumed, whole, **exact)


@pytest.mark.parametrize("method", REFERENCES)
@pytest.mark.parametrize(("P", "K"), [(2, 1), (3, 1)])
def test_equal_models_stay_as_they_are(run, method: str, P: int, K: int) -> None:
    """With a learning rate of 0, the groups never leave the initial model."""

    def train(world: Communicator) -> tuple[Tensor, Tensor]:
        net, optimizer, topology = of_method(world, method, P, lr=0.0)
        for t in range(STEPS):
            one_step(net, optimizer, topology, t)
            optimizer.average_models()
        return vector(net), vector(model())

    for found, expected in run(P * K, train):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", ["selsync", "selsync by gradients"])
@pytest.mark.parametrize(("P", "K"), [(2, 1), (3, 1)])
def test_the_groups_of_selsync_have_one_model_then(run, method: str, P: int, K: int) -> None:
    def train(world: Communicator) -> Tensor:
        net, optimizer, topology = of_method(world, method, P)
        for t in range(STEPS):
            one_step(net, optimizer, topology, t)
        optimizer.average_models()
        return vector(net)

    models = run(P * K, train)
    for other in models[1:]:
        torch.testing.assert_close(other, models[0], rtol=0, atol=1e-12)
