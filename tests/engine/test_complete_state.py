"""After `consolidate_state_dict(to)` one rank saves the state of all, and each rank loads its own from it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn, optim

import hpcsgd
from hpcsgd import DistributedOptimizer, UserError
from hpcsgd.comm import Communicator
from hpcsgd.core.topology import form
from methods.table import RATES, REFERENCES
from references import follow, one_step, vector
from references import model as make_model
from trainings import Training

BEFORE, STEPS = 4, 7
OFTEN = {"diloco", "hierarchical"}
METHODS = [label for label, case in REFERENCES.items() if case.same_bits and case.form is form]


def momentum(net: nn.Module) -> optim.Optimizer:
    return optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


class Counting(optim.Optimizer):
    """An optimizer with numbers in its groups, as Prodigy, and one in its state, as MADGRAD.

    It needs whole parameters.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        numbers = cast("dict[Any, Any]", self.state)
        for group in self.param_groups:
            grads = [p.grad for p in group["params"] if p.grad is not None]
            group["seen"] = group.get("seen", 0.0) + sum(float(g.abs().sum()) for g in grads)
            numbers["seen"] = numbers.get("seen", 0.0) + group["seen"]
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / (1 + numbers["seen"]))


def train(net: nn.Module, optimizer: DistributedOptimizer, steps: range) -> None:
    for t in steps:
        one_step(net, optimizer, optimizer.topology, t)


def saved_by_one(optimizer: DistributedOptimizer, to: int, folder: Path) -> dict[str, Any]:
    """Save the state as scripts usually do, with `state_dict()` on one rank alone, and load it on all."""
    world = optimizer.topology.world
    optimizer.consolidate_state_dict(to)
    if world.rank == to:
        torch.save(optimizer.state_dict(), folder / "state.pt")
    world.barrier()
    return torch.load(folder / "state.pt")


@pytest.mark.threads(unless={"method": OFTEN, "P": 2, "K": 2})
@pytest.mark.parametrize(("P", "K"), [(1, 1), (1, 3), (2, 1), (2, 2), (3, 2)])
@pytest.mark.parametrize("method", METHODS)
def test_training_goes_on_to_the_same_bits(run, tmp_path: Path, method: str, P: int, K: int) -> None:
    """All methods continue with the same bits from one file that all ranks read.

    Each rank loads its own weights.
    """
    case, to = REFERENCES[method], P * K - 1

    def body(world: Communicator) -> None:
        topology = case.form(world, P)

        def new() -> tuple[nn.Module, DistributedOptimizer, Callable[[range], None]]:
            net = make_model()
            inner = optim.SGD(net.parameters(), lr=0.1) if case.plain_sgd else momentum(net)
            optimizer = DistributedOptimizer(inner, net, topology, case.new())
            set_rate = follow(optimizer, RATES)

            def go_on(steps: range) -> None:
                for t in steps:
                    set_rate(t)
                    one_step(net, optimizer, topology, t)

            return net, optimizer, go_on

        net, optimizer, go_on = new()
        go_on(range(BEFORE))
        weights, state = copy.deepcopy(net.state_dict()), saved_by_one(optimizer, to, tmp_path)
        go_on(range(BEFORE, STEPS))
        again, resumed, go_on_again = new()
        again.load_state_dict(weights)
        resumed.load_state_dict(state)
        assert resumed.t == BEFORE
        go_on_again(range(BEFORE, STEPS))
        assert torch.equal(vector(net), vector(again))

    run(P * K, body)


@pytest.mark.threads(unless={"optimizer": {"momentum"}})
@pytest.mark.parametrize("optimizer", ["momentum", "AdamW", "NAdam", "muon", "whole tensors"])
@pytest.mark.parametrize("method", ["hierarchical", "bsp"])
@pytest.mark.parametrize(("P", "K"), [(2, 2), (2, 1)])
def test_states_of_optimizers(run, tmp_path: Path, P: int, K: int, method: str, optimizer: str) -> None:
    def body(world: Communicator) -> None:
        topology = form(world, P)
        one, other = (Training(topology, optimizer, method) for _ in range(2))
        one.steps(BEFORE)
        weights, own = copy.deepcopy(one.net.state_dict()), copy.deepcopy(one.optimizer.state_dict())
        state = saved_by_one(one.optimizer, 0, tmp_path)
        other.steps(1)  # loading replaces this state
        other.net.load_state_dict(weights)
        other.optimizer.load_state_dict(state)
        found = other.optimizer.state_dict()
        assert found["param_groups"] == own["param_groups"]
        for each in (found, own):
            del each["hpcsgd"]["saved_by"]  # this key has no counterpart to compare with
        for key in ("state", "hpcsgd"):
            torch.testing.assert_close(found[key], own[key], rtol=0, atol=0)

    run(P * K, body)


@pytest.mark.ranks(2)
def test_numbers_that_an_optimizer_has_for_each_group(run, tmp_path: Path) -> None:
    """Numbers that all groups share are loaded from the file, where a script may have changed them."""

    def body(world: Communicator) -> None:
        topology = form(world, 2)

        def new() -> tuple[nn.Module, DistributedOptimizer]:
            net = make_model()
            inner = Counting(net.parameters(), lr=0.1)
            return net, DistributedOptimizer(inner, net, topology, hpcsgd.hierarchical(4))

        net, optimizer = new()
        train(net, optimizer, range(2))
        weights, state = copy.deepcopy(net.state_dict()), saved_by_one(optimizer, 0, tmp_path)
        state["param_groups"][0]["lr"] = optimizer.param_groups[0]["lr"] = 0.05
        train(net, optimizer, range(2, 4))
        again, resumed = new()
        again.load_state_dict(weights)
        resumed.load_state_dict(state)
        train(again, resumed, range(2, 4))
        assert torch.equal(vector(net), vector(again))
        assert resumed.param_groups[0]["seen"] == optimizer.param_groups[0]["seen"]
        mine, theirs = ({k: v for k, v in each.state.items() if k == "seen"} for each in (resumed, optimizer))
        assert mine == theirs != {}

    run(2, body)


def made(world: Communicator, P: int, method: str = "diloco") -> tuple[nn.Module, DistributedOptimizer]:
    net = make_model()
    return net, DistributedOptimizer(momentum(net), net, form(world, P), REFERENCES[method].new())


@pytest.mark.ranks(4)
def test_one_rank_has_the_state_until_the_next_step(run) -> None:
    def body(world: Communicator) -> None:
        net, optimizer = made(world, 2)
        train(net, optimizer, range(2))
        optimizer.consolidate_state_dict(to=1)
        if world.rank == 1:
            assert optimizer.state_dict()["hpcsgd"]["t"] == 2
            optimizer.param_groups[0]["lr"] = 0.01
            assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.01
            optimizer.param_groups[0]["lr"] = 0.1
        else:
            with pytest.raises(UserError, match=r"gathered it on rank 1; call state_dict\(\) there alone"):
                optimizer.state_dict()
        optimizer.consolidate_state_dict()
        if world.rank == 0:
            before = copy.deepcopy(optimizer.state_dict())
        train(net, optimizer, range(2, 3))
        if world.rank == 0:
            assert before["hpcsgd"]["t"] == 2
        assert "ranks" not in optimizer.state_dict()["hpcsgd"]  # each rank's own
        optimizer.consolidate_state_dict()
        optimizer.average_models()
        state = optimizer.state_dict()
        optimizer.consolidate_state_dict()
        optimizer.load_state_dict(state)
        assert "ranks" not in optimizer.state_dict()["hpcsgd"]

    run(4, body)


@pytest.mark.ranks(4)
def test_on_another_number_of_groups_it_counts_as_the_state_of_one_rank(run) -> None:
    def body(world: Communicator) -> None:
        net, optimizer = made(world, 2)
        train(net, optimizer, range(2))
        own = world.gather_objects(copy.deepcopy(optimizer.state_dict()))[0]
        optimizer.consolidate_state_dict()
        state = world.gather_objects(optimizer.state_dict() if world.rank == 0 else None)[0]
        found = []
        for each in (own, state):
            again, resumed = made(world, 1)
            again.load_state_dict(copy.deepcopy(net.state_dict()))
            resumed.load_state_dict(each)
            train(again, resumed, range(2, 4))
            found.append(vector(again))
        assert torch.equal(*found)

    run(4, body)


@pytest.mark.ranks(2)
def test_no_rank_of_that_number_and_unlike_numbers(run) -> None:
    def body(world: Communicator) -> None:
        _, optimizer = made(world, 1)
        for to in (-1, 2):
            with pytest.raises(UserError, match=rf"to = {to}: expected a rank from 0 to 1"):
                optimizer.consolidate_state_dict(to)
        with pytest.raises(UserError, match=r"consolidate_state_dict\(0\).*consolidate_state_dict\(1\)"):
            optimizer.consolidate_state_dict(world.rank)

    run(2, body)


@pytest.mark.ranks(2)
def test_estimates_of_natural_gradients_are_not_in_it(run) -> None:
    def body(world: Communicator) -> None:
        net, optimizer = made(world, 1)
        with pytest.raises(UserError, match="estimates of natural gradients are of each rank"):
            hpcsgd.NaturalGradient(optimizer, net).consolidate_state_dict()

    run(2, body)
