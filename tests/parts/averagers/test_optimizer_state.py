"""Momentum at synchronizations: kept, averaged or reset, each compared with plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import hpcsgd
from hpcsgd import Method, allreduce_local_sgd, hierarchical
from hpcsgd.comm import Communicator, threads
from hpcsgd.core.topology import form
from hpcsgd.errors import UserError
from hpcsgd.parts.averagers import AverageState, ResetState, keep_state
from references import MakeOptimizer, average, distributed, gathered_step, set_vector, vector
from references import model as make_model

EVERY, STEPS = 2, 7

Optimizers = Sequence[optim.Optimizer]


def leave(optimizers: Optimizers) -> None:
    pass


def mean(optimizers: Optimizers) -> None:
    for states in zip(*(optimizer.state.values() for optimizer in optimizers), strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            together = torch.stack([state[name] for state in states]).mean(0)
            for state in states:
                state[name].copy_(together)


def forget(optimizers: Optimizers) -> None:
    """Clear the state as in a new optimizer, including its count of steps."""
    for optimizer in optimizers:
        optimizer.state.clear()


@pytest.mark.threads(unless={"P": 2, "K": 2})
@pytest.mark.parametrize(
    ("moments", "reference"), [(keep_state, leave), (AverageState, mean), (ResetState, forget)]
)
@pytest.mark.parametrize(("P", "K"), [(2, 1), (2, 2), (4, 1), (2, 4)])
@pytest.mark.parametrize("method", [hierarchical, allreduce_local_sgd])
def test_optimizer_state(
    run,
    P: int,
    K: int,
    method: Callable[..., Method],
    moments: Callable,
    reference: Callable[[Optimizers], None],
) -> None:
    nets = [make_model() for _ in range(P)]
    optimizers = [optim.Adam(net.parameters(), lr=0.05) for net in nets]
    for t in range(STEPS):
        for g, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            gathered_step(net, optimizer, t, range(g * K, (g + 1) * K))
        if (t + 1) % EVERY == 0:
            average(nets)
            reference(optimizers)

    def train(world: Communicator) -> torch.Tensor:
        made = method(EVERY, optimizer_state=moments)
        return distributed(world, P, made, lambda params: optim.Adam(params, lr=0.05), STEPS)[-1]

    for rank, ours in enumerate(run(P * K, train)):
        torch.testing.assert_close(ours, vector(nets[rank // K]), rtol=0, atol=1e-12)


class Two(nn.Module):
    """A model with three parts: all groups use the first, odd groups the second, and no group the third."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        for name, size in (("shared", 3), ("odd", 5), ("idle", 2)):
            value = torch.randn(size, generator=generator, dtype=torch.float64)
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, t: int, g: int) -> Tensor:
        x = torch.linspace(-1, 1, 5, dtype=torch.float64) + t + g
        used = (self.get_parameter("shared") * x[:3]).sum().sin()
        return used + (self.get_parameter("odd") * x).sum().cos() if g % 2 else used


ADAPTIVE: dict[str, MakeOptimizer] = {
    "momentum": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
    "Adam": lambda params: optim.Adam(params, lr=0.05),
    "NAdam": lambda params: optim.NAdam(params, lr=0.05),
    "Adagrad": lambda params: optim.Adagrad(params, lr=0.1, initial_accumulator_value=0.3),
    "Rprop": lambda params: optim.Rprop(params, lr=0.03),
    "ASGD": lambda params: optim.ASGD(params, lr=0.1, t0=2),
}
STARTS: dict[str, dict[str, float]] = {
    "momentum": {"momentum_buffer": 0},
    "Adam": {"step": 0, "exp_avg": 0, "exp_avg_sq": 0},
    "NAdam": {"step": 0, "mu_product": 1, "exp_avg": 0, "exp_avg_sq": 0},
    "Adagrad": {"step": 0, "sum": 0.3},
    "Rprop": {"step": 0, "prev": 0, "step_size": 0.03},
    "ASGD": {"step": 0, "eta": 0.1, "mu": 1, "ax": 0},
}
"""The start values in the papers and in torch's documentation."""
WHOLE = {"step", "mu_product", "eta", "mu"}


def averaged_by_hand(name: str, optimizers: Optimizers) -> None:
    for params in zip(*(o.param_groups[0]["params"] for o in optimizers), strict=True):
        for key, start in STARTS[name].items():
            values = []
            for o, p in zip(optimizers, params, strict=True):
                shape = () if key in WHOLE else p.shape
                dtype = torch.float32 if key in WHOLE else p.dtype
                values.append(o.state[p].get(key, torch.full(shape, start, dtype=dtype)))
            for o, p in zip(optimizers, params, strict=True):
                o.state[p][key] = torch.stack(values).mean(0)


@pytest.mark.parametrize("P", [2, 3])
@pytest.mark.parametrize("name", ADAPTIVE)
def test_groups_that_used_other_parts_average_alike(run, name: str, P: int) -> None:
    """State that a group never updated counts as the optimizer's start value, and parts are not mixed up."""

    def train(world: Communicator) -> list[Tensor]:
        net, topology = Two(), form(world, groups=P)
        method = hierarchical(2, optimizer_state=AverageState)
        inner = ADAPTIVE[name](list(net.parameters()))
        optimizer = hpcsgd.DistributedOptimizer(inner, net, topology, method)
        for t in range(6):
            optimizer.zero_grad()
            net(t, topology.group_index).backward()
            optimizer.step()
        return [p.detach().clone() for p in net.parameters()]

    nets: list[nn.Module] = [Two() for _ in range(P)]
    optimizers = [ADAPTIVE[name](list(net.parameters())) for net in nets]
    for t in range(6):
        for g, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            optimizer.zero_grad()
            net(t, g).backward()
            optimizer.step()
        if t % 2:
            average(nets)
            averaged_by_hand(name, optimizers)
    for mine, net in zip(run(P, train), nets, strict=True):
        torch.testing.assert_close(mine, [p.detach() for p in net.parameters()], rtol=0, atol=1e-12)


@pytest.mark.ranks(2)
def test_unlike_states_are_refused_on_all_ranks(run) -> None:
    """States differ if one group alone loads a state after the optimizer was wrapped."""

    def train(world: Communicator) -> str:
        net, topology = Two(), form(world, groups=2)
        inner = optim.Adam(net.parameters(), lr=0.1)
        optimizer = hpcsgd.DistributedOptimizer(
            inner, net, topology, hierarchical(1, optimizer_state=AverageState)
        )
        net(0, 1).backward()
        optimizer.step()
        for state in optimizer.state.values() if topology.group_index == 1 else ():
            state["max_exp_avg_sq"] = torch.zeros_like(state["exp_avg"])
        optimizer.zero_grad()
        net(0, 1).backward()
        with pytest.raises(UserError) as caught:
            optimizer.step()
        return str(caught.value)

    for message in run(2, train):
        assert "state tensors differ between groups" in message
        assert "10 elements of max_exp_avg_sq in 1" in message


@pytest.mark.parametrize("name", ADAPTIVE)
@pytest.mark.parametrize(("P", "K"), [(2, 1), (2, 2)])
def test_reset_is_the_state_of_a_new_optimizer(run, name: str, P: int, K: int) -> None:
    """After a late synchronization the next updates equal those of a new optimizer."""

    def train(world: Communicator) -> tuple[list[Tensor], list[Tensor]]:
        topology = form(world, groups=P)

        def step(net: nn.Module, optimizer: Any, t: int) -> None:
            optimizer.zero_grad()
            (net(t, 0) + net(t, 1)).backward()
            optimizer.step()

        net = Two()
        method = hierarchical(5, optimizer_state=ResetState)
        optimizer = hpcsgd.DistributedOptimizer(ADAPTIVE[name](list(net.parameters())), net, topology, method)
        for t in range(5):
            step(net, optimizer, t)
        anew = Two()
        with torch.no_grad():
            set_vector(anew, vector(net))
        plain = ADAPTIVE[name](list(anew.parameters()))
        for t in range(5, 8):
            step(net, optimizer, t)
            for p in anew.parameters():
                p.grad = None
            (anew(t, 0) + anew(t, 1)).backward()
            plain.step()
        return [p.detach() for p in net.parameters()], [p.detach() for p in anew.parameters()]

    for mine, theirs in run(P * K, train):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


class Asking(optim.SGD):
    """An optimizer that cannot be made from its defaults."""

    def __init__(self, params: Iterable[nn.Parameter], secret: str) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.secret = secret


def test_an_optimizer_that_cannot_be_made_anew_is_refused() -> None:
    def train(world: Communicator) -> None:
        net = Two()
        optimizer = hpcsgd.DistributedOptimizer(
            Asking(net.parameters(), "?"),
            net,
            form(world, groups=2),
            hierarchical(1, optimizer_state=ResetState),
        )
        net(0, 1).backward()
        optimizer.step()

    with pytest.raises(UserError, match=r"a new Asking cannot be made from its defaults: .*'secret'"):
        threads.run(2, train)
