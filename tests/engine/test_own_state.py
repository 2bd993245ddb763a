"""A rank may load its own `state_dict()`, and that of another rank only if both are the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

import hpcsgd
from hpcsgd import DistributedOptimizer, UserError
from hpcsgd.comm import Communicator
from hpcsgd.core.topology import form
from references import batch, loss, model, vector

METHODS: dict[str, Callable[[], hpcsgd.Method]] = {
    "bsp": hpcsgd.bsp,
    "hierarchical": lambda: hpcsgd.hierarchical(2),
    "diloco": lambda: hpcsgd.diloco(2),
    "nothing kept": lambda: hpcsgd.sasgd(2),  # with one group
    "error feedback": lambda: hpcsgd.bsp(grad_reduce=hpcsgd.Sparse(hpcsgd.TopK(0.25))),
}


def made(world: Communicator, P: int, method: str) -> tuple[nn.Module, Any]:
    net = model()
    inner = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return net, DistributedOptimizer(inner, net, form(world, P), METHODS[method]())


def train(world: Communicator, net: nn.Module, optimizer: Any, steps: range) -> None:
    for t in steps:
        optimizer.zero_grad()
        loss(net, *batch(t, world.rank)).backward()
        optimizer.step()


def after_two_steps(world: Communicator, P: int, method: str) -> tuple[nn.Module, Any, list[dict[str, Any]]]:
    """Return a training after two steps, and the states of all ranks."""
    net, optimizer = made(world, P, method)
    train(world, net, optimizer, range(2))
    return net, optimizer, world.gather_objects(copy.deepcopy(optimizer.state_dict()))


@pytest.mark.threads(unless={"P": 2, "K": 2})
@pytest.mark.parametrize(
    ("method", "P", "K"),
    [("bsp", 1, 3), ("hierarchical", 1, 2), ("bsp", 2, 1), ("bsp", 2, 2), ("nothing kept", 1, 2)],
)
def test_what_is_the_same_everywhere_one_rank_may_save_for_all(run, method: str, P: int, K: int) -> None:
    def body(world: Communicator) -> None:
        net, optimizer, states = after_two_steps(world, P, method)
        other, resumed = made(world, P, method)
        other.load_state_dict(copy.deepcopy(net.state_dict()))
        resumed.load_state_dict(states[0])
        assert resumed.t == 2
        for each, of in ((net, optimizer), (other, resumed)):
            train(world, each, of, range(2, 5))
        assert torch.equal(vector(net), vector(other))

    run(P * K, body)


@pytest.mark.threads(unless={"method": {"diloco", "hierarchical"}})
@pytest.mark.parametrize(
    ("method", "P", "K", "has"),
    [
        ("hierarchical", 2, 1, "the optimizer of its group"),
        ("diloco", 2, 2, r"averager \(sharded\)"),
        ("error feedback", 1, 2, r"grad_reduce \(per_rank_params\)"),
    ],
)
def test_another_rank_s_own_state_is_refused(run, method: str, P: int, K: int, has: str) -> None:
    """Another rank's state is refused before anything is loaded, and only on the rank where it is wrong."""

    def body(world: Communicator) -> None:
        net, optimizer, states = after_two_steps(world, P, method)
        last = P * K - 1
        if world.rank == last:
            line = rf"is that of rank 0, and rank {last} has another one of .*{has}.*: call .*consolidate_"
            with pytest.raises(UserError, match=line):
                optimizer.load_state_dict(states[0])
        else:
            optimizer.load_state_dict(states[world.rank])
        train(world, net, optimizer, range(2, 4))
        other, untouched, _ = after_two_steps(world, P, method)
        train(world, other, untouched, range(2, 4))
        assert torch.equal(vector(net), vector(other))

    run(P * K, body)


@pytest.mark.ranks(4)
def test_in_a_group_all_ranks_may_have_the_state_of_one(run) -> None:
    """Hierarchical local SGD keeps no other state, so all ranks of a group may load that of one."""

    def body(world: Communicator) -> None:
        net, optimizer, states = after_two_steps(world, 2, "hierarchical")
        first_of_group = world.rank - world.rank % 2
        optimizer.load_state_dict(states[first_of_group])
        train(world, net, optimizer, range(2, 4))
        other, untouched, _ = after_two_steps(world, 2, "hierarchical")
        train(world, other, untouched, range(2, 4))
        assert torch.equal(vector(net), vector(other))

    run(4, body)
