"""State that belongs to no parameter or not to the wrapped optimizer, and optimizers around ours."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from hpcsgd import DistributedOptimizer, bsp, hierarchical
from hpcsgd.checkpoint import Checkpoints, capture, restore
from hpcsgd.comm import Communicator, threads
from hpcsgd.core.topology import Topology, form
from hpcsgd.engine.inside import load_own_state, state_of
from hpcsgd.errors import UserError
from hpcsgd.parts.averagers import ResetState
from references import batch, loss, model, vector
from special_optimizers import Adaptive, Counting, Lookahead, Sam, ScheduleFree

HALF, STEPS = 3, 6
MAKERS: dict[str, Callable[..., optim.Optimizer]] = {
    "under a name": Counting,
    "of an optimizer inside": Sam,
    "in param groups": Adaptive,
}


def test_state_of_several_optimizers_inside_goes_back_to_each() -> None:
    param, one = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))
    made, empty = ([optim.SGD([one]) for _ in range(3)] for _ in range(2))
    for number, each in enumerate(made):
        each.state[param] = {"step": number, "1.step": 10 + number}
    load_own_state(empty, param, state_of(made, param))
    assert [each.state[param] for each in empty] == [each.state[param] for each in made]


def train(net: nn.Module, optimizer: Any, steps: range, ranks: range) -> None:
    def closure(t: int) -> Tensor:
        value = torch.stack([loss(net, *batch(t, rank)) for rank in ranks]).mean()
        value.backward()
        return value

    for t in steps:
        optimizer.zero_grad()
        closure(t)
        inner = getattr(optimizer, "local", None)
        takes_closure = isinstance(optimizer if inner is None else inner.optimizer, Sam)
        optimizer.step(lambda t=t: closure(t)) if takes_closure else optimizer.step()


def wrapped(
    topology: Topology, make: Callable[..., optim.Optimizer], **options: Any
) -> tuple[nn.Module, DistributedOptimizer]:
    net = model()
    method = options.pop("method", None) or bsp()
    return net, DistributedOptimizer(make(net.parameters()), net, topology, method, **options)


def of_rank(topology: Topology) -> range:
    return range(topology.rank, topology.rank + 1)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("n", [1, 2])
def test_a_state_dict_goes_on(run, n: int, name: str) -> None:
    expected = model()
    train(expected, MAKERS[name](expected.parameters()), range(STEPS), range(n))

    def resumed(world: Communicator) -> Tensor:
        topology = form(world, 1)
        first, optimizer = wrapped(topology, MAKERS[name])
        train(first, optimizer, range(HALF), of_rank(topology))
        second, other = wrapped(topology, MAKERS[name])
        second.load_state_dict(first.state_dict())
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(second, other, range(HALF, STEPS), of_rank(topology))
        return vector(second)

    for found in run(n, resumed):
        torch.testing.assert_close(found, vector(expected), rtol=0, atol=1e-12)


@pytest.mark.ranks(2)
def test_it_is_laid_out_as_torchs_own(run) -> None:
    def both(world: Communicator) -> tuple[Any, Any]:
        topology = form(world, 1)
        net, optimizer = wrapped(topology, Counting)
        train(net, optimizer, range(HALF), of_rank(topology))
        plain = Counting(model().parameters())
        plain.load_state_dict(optimizer.state_dict())
        return optimizer.state_dict()["state"], plain.state_dict()["state"]

    for ours, torchs in run(2, both):
        assert ours == torchs == {"k": torch.tensor(HALF)}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("now", [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_a_checkpoint_goes_on_in_every_shape(run, tmp_path: Path, now: tuple[int, int], name: str) -> None:
    expected = model()
    train(expected, MAKERS[name](expected.parameters()), range(STEPS), range(1))
    everyone = range(1)  # all ranks use the same batches, so that their number does not matter

    def saving(world: Communicator) -> None:
        topology = form(world, 1)
        net, optimizer = wrapped(topology, MAKERS[name])
        train(net, optimizer, range(HALF), everyone)
        Checkpoints(tmp_path, topology).write(HALF, capture(optimizer, shared={}, own={}))

    def going_on(world: Communicator) -> Tensor:
        if world.rank == 0:
            threads.run(2, saving)
        world.barrier()
        topology = form(world, now[0])
        net, optimizer = wrapped(topology, MAKERS[name])
        saved = Checkpoints(tmp_path, topology).newest()
        assert saved is not None
        restore(saved, optimizer)
        train(net, optimizer, range(HALF, STEPS), everyone)
        return vector(net)

    for found in run(now[0] * now[1], going_on):
        torch.testing.assert_close(found, vector(expected), rtol=0, atol=1e-12)


@pytest.mark.parametrize("make", [Counting, Sam, Adaptive])
@pytest.mark.parametrize(("P", "K"), [(2, 1), (2, 2)])
def test_reset_is_a_new_optimizer(run, P: int, K: int, make: Callable[..., optim.Optimizer]) -> None:
    """A reset gives a new optimizer, except for options that a user or a scheduler has set."""

    def late_synchronization(world: Communicator) -> tuple[Tensor, Tensor, dict[str, Any]]:
        topology = form(world, P)
        net, optimizer = wrapped(topology, make, method=hierarchical(HALF, optimizer_state=ResetState))
        optimizer.param_groups[0] |= {"lr": 0.02, "initial_lr": 0.3, "whose": 7}
        train(net, optimizer, range(HALF), range(1))
        anew = model()
        with torch.no_grad():
            for mine, theirs in zip(anew.parameters(), net.parameters(), strict=True):
                mine.copy_(theirs)
        plain = make(anew.parameters(), lr=0.02)
        for each, trained in ((optimizer, net), (plain, anew)):
            train(trained, each, range(HALF, HALF + 2), range(1))
        return vector(net), vector(anew), optimizer.param_groups[0]

    for found, expected, group in run(P * K, late_synchronization):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        assert (group["lr"], group["initial_lr"], group["whose"]) == (0.02, 0.3, 7)


@pytest.mark.ranks(2)
def test_reset_leaves_an_optimizer_in_its_mode(run) -> None:
    def in_training(world: Communicator) -> dict[str, Any]:
        topology = form(world, 2)
        net, optimizer = wrapped(
            topology, ScheduleFree, method=hierarchical(HALF, optimizer_state=ResetState)
        )
        optimizer.train()
        train(net, optimizer, range(STEPS - 1), of_rank(topology))
        return optimizer.param_groups[0]

    for group in run(2, in_training):
        assert (group["k"], group["train_mode"]) == (STEPS - 1 - HALF, True)


def sgd(params: Any) -> optim.Optimizer:
    return optim.SGD(params, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_slow_weights_around_ours(run, n: int, prefetch: bool) -> None:
    def around(net: nn.Module, optimizer: Any, ranks: range) -> Tensor:
        outer = Lookahead(optimizer)
        for t in range(STEPS):
            optimizer.zero_grad()
            torch.stack([loss(net, *batch(t, rank)) for rank in ranks]).mean().backward()
            outer.step()
        return vector(net)

    plain = model()
    expected = around(plain, sgd(plain.parameters()), range(n))

    def ours(world: Communicator) -> Tensor:
        topology = form(world, 1)
        net, optimizer = wrapped(topology, sgd, overlap_param_gather=prefetch)
        return around(net, optimizer, of_rank(topology))

    for found in run(n, ours):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def slow_weights(world: Communicator, **options: Any) -> tuple[Any, DistributedOptimizer]:
    topology = form(world, 1)
    net, optimizer = wrapped(topology, sgd, **options)
    outer = Lookahead(optimizer, k=1)
    loss(net, *batch(0, topology.rank)).backward()
    outer.step()
    return outer, optimizer


@pytest.mark.ranks(2)
def test_state_of_whole_parameters_is_not_left_out(run) -> None:
    def saved(world: Communicator) -> dict[str, Any]:
        return slow_weights(world)[1].state_dict()

    with pytest.raises(UserError, match="slow of a whole parameter"):
        run(2, saved)


@pytest.mark.ranks(2)
def test_state_that_the_optimizer_would_not_find_is_refused(run) -> None:
    """For example, slow weights around ours may try to reset its momentum."""

    def replace_momentum(world: Communicator) -> None:
        topology = form(world, 1)
        net, optimizer = wrapped(topology, sgd)
        for param in net.parameters():
            optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)
        train(net, optimizer, range(2), of_rank(topology))

    with pytest.raises(UserError, match="momentum_buffer of a whole parameter was put"):
        run(2, replace_momentum)


class Wide(optim.Optimizer):
    """An optimizer with its own `load_state_dict()`, whose state is float64 for any parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            m = self.state[p].setdefault("m", torch.zeros_like(p, dtype=torch.float64))
            p.sub_(m.add_(p.grad.double()).to(p.dtype), alpha=0.1)


@pytest.mark.parametrize("n", [1, 2])
def test_state_keeps_a_type_that_the_optimizer_chooses(run, n: int) -> None:
    def loaded(world: Communicator) -> tuple[Tensor, Tensor]:
        nets = [model(dtype=torch.float32) for _ in range(2)]
        first, second = (
            DistributedOptimizer(Wide(net.parameters()), net, form(world, 1), bsp()) for net in nets
        )
        loss(nets[0], *batch(0, world.rank, dtype=torch.float32)).backward()
        first.step()
        second.load_state_dict(first.state_dict())
        return second.state_dict()["state"][0]["m"], first.state_dict()["state"][0]["m"]

    for found, expected in run(n, loaded):
        assert found.dtype == torch.float64
        assert torch.equal(found, expected)


@pytest.mark.ranks(1)
def test_what_is_no_optimizer_is_refused(run) -> None:
    def wrap(world: Communicator) -> None:
        net = model()
        around: Any = Lookahead(sgd(net.parameters()))
        DistributedOptimizer(around, net, form(world, 1), bsp())

    with pytest.raises(UserError, match="Lookahead is no torch optimizer"):
        run(1, wrap)


@pytest.mark.ranks(2)
def test_it_is_saved_where_optimizers_update_whole_parameters(run) -> None:
    def saved(world: Communicator) -> set[str]:
        state = slow_weights(world, elementwise=False, tensorwise=False)[1].state_dict()["state"]
        return {name for of_parameter in state.values() for name in of_parameter}

    assert run(2, saved) == [{"momentum_buffer", "slow"}] * 2
