"""The optimizer's state on the ranks of a group; a parameter that is a single number is the hard case."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, optim

from hpcsgd.comm import Communicator
from hpcsgd.core.topology import form
from hpcsgd.engine.inside import optimizers_in
from hpcsgd.errors import UserError
from trainings import OPTIMIZERS, Net, Training


@pytest.mark.parametrize("n", [1, 2])
def test_optimizer_state_is_all_tensors_of_the_own_pieces(run, n: int) -> None:
    """The state has tensors with a value for every element that this rank owns, and their number of steps."""

    def of_rank(world: Communicator) -> tuple[set[str], int, int]:
        training = Training(form(world), "AdamW")
        training.steps(1)
        tensors = training.optimizer.local.tensors()
        elements = sum(x.numel() for x in tensors["exp_avg"])
        return set(tensors), elements, sum(p.numel() for _, p in training.optimizer.trained)

    ranks = run(n, of_rank)
    assert sum(elements for _, elements, _ in ranks) == ranks[0][2]
    for names, _, _ in ranks:
        assert names == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}


@pytest.mark.threads(unless={"n": 4, "optimizer": {"AdamW", "muon", "whole tensors"}})
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_state_dict_goes_on(run, n: int, optimizer: str) -> None:
    def whole_and_resumed(world: Communicator) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        whole, resumed = (Training(form(world), optimizer, seed=seed) for seed in (0, 1))
        whole.steps(3)
        resumed.net.load_state_dict(copy.deepcopy(whole.net.state_dict()))
        resumed.optimizer.load_state_dict(copy.deepcopy(whole.optimizer.state_dict()))
        resumed.t = whole.t
        for training in (whole, resumed):
            training.steps(2)
        return whole.everything(), resumed.everything()

    for whole, resumed in run(n, whole_and_resumed):
        assert whole.keys() == resumed.keys()
        for name, value in whole.items():
            assert torch.equal(value, resumed[name]), name


@pytest.mark.parametrize("n", [1, 2, 4])
def test_the_state_dict_is_that_of_torch(run, n: int) -> None:
    """The keys and shapes are the same, so each optimizer can load the state of the other."""

    def shapes(world: Communicator) -> dict[tuple[int, str], torch.Size]:
        training = Training(form(world), "AdamW")
        training.steps(1)
        return shapes_of(training.optimizer)

    net = Net()
    plain = OPTIMIZERS["AdamW"](net)
    net(torch.randn(4, 3, 6, 6)).sum().backward()
    plain.step()
    for found in run(n, shapes):
        assert found == shapes_of(plain)


@pytest.mark.parametrize("optimizer", ["AdamW", "muon"])
@pytest.mark.ranks(2)
def test_a_state_dict_of_the_wrapped_optimizer_names_that_of_the_whole(run, optimizer: str) -> None:
    def look(world: Communicator) -> None:
        training = Training(form(world), optimizer)
        training.steps(1)
        for each in optimizers_in(training.optimizer.local.optimizer):
            with pytest.raises(UserError, match=r"state_dict\(\) of the DistributedOptimizer on all ranks"):
                each.state_dict()
        assert training.optimizer.state_dict()["state"]

    run(2, look)


@pytest.mark.parametrize(("n", "P"), [(1, 1), (2, 2)])
def test_a_rank_with_the_whole_state_saves_it_by_the_wrapped_optimizer_too(run, n: int, P: int) -> None:
    def states(world: Communicator) -> tuple[object, object]:
        training = Training(form(world, P), "AdamW")
        training.steps(1)
        return training.optimizer.local.optimizer.state_dict()["state"], training.optimizer.state_dict()[
            "state"
        ]

    for wrapped, whole in run(n, states):
        torch.testing.assert_close(wrapped, whole, rtol=0, atol=0)


def shapes_of(optimizer: optim.Optimizer) -> dict[tuple[int, str], torch.Size]:
    state = optimizer.state_dict()["state"]
    return {(i, name): value.shape for i, values in state.items() for name, value in values.items()}
