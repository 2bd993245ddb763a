"""Around a DistributedOptimizer, every rank preconditions its own gradient before the reduction."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import hpcsgd
from hpcsgd import DistributedOptimizer, NaturalGradient, UserError
from hpcsgd.comm import Communicator
from hpcsgd.core.topology import form
from hpcsgd.methods import Method, allreduce_local_sgd, bsp, hierarchical
from references import average, batch, loss, model, one_step, set_vector, vector

EVERY, STEPS = 3, 7
OPTIONS: dict[str, Any] = {"rank": 2, "every": 2, "history": 20.0}
METHODS: dict[str, tuple[Method, bool]] = {
    "bsp": (bsp(), True),
    "hierarchical": (hierarchical(EVERY), False),
    "allreduce local SGD": (allreduce_local_sgd(EVERY), False),
}
"""By name: the method, and whether all groups have the same model."""


def momentum(net: nn.Module) -> optim.Optimizer:
    return optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)


def trained(world: Communicator, P: int, method: Method, **options: Any) -> list[Tensor]:
    topology, net = form(world, groups=P), model(seed=world.rank)
    distributed = DistributedOptimizer(momentum(net), net, topology, copy.deepcopy(method), **options)
    optimizer = NaturalGradient(distributed, net, **OPTIONS)
    return [one_step(net, optimizer, topology, t) for t in range(STEPS)]


def expected(P: int, K: int, every: int) -> list[list[Tensor]]:
    """Train P groups in plain torch, with a model per rank for its gradient and one per group for the update.

    Returns [step][group] → parameters.
    """
    ranks = [model() for _ in range(P * K)]
    natural = [NaturalGradient(optim.SGD(net.parameters(), lr=0.0), net, **OPTIONS) for net in ranks]
    groups = [model() for _ in range(P)]
    optimizers = [momentum(net) for net in groups]
    history = []
    for t in range(STEPS):
        for g, (group, optimizer) in enumerate(zip(groups, optimizers, strict=True)):
            members = range(g * K, (g + 1) * K)
            for rank in members:
                set_vector(ranks[rank], vector(group))
                natural[rank].zero_grad()
                loss(ranks[rank], *batch(t, rank)).backward()
                natural[rank].step()
            for p, *theirs in zip(
                group.parameters(), *(ranks[rank].parameters() for rank in members), strict=True
            ):
                p.grad = torch.stack([q.grad for q in theirs if q.grad is not None]).mean(0)
            optimizer.step()
        if (t + 1) % every == 0:
            average(groups)
        history.append([vector(net) for net in groups])
    return history


@pytest.mark.threads(unless={"P": 2, "K": 2})
@pytest.mark.parametrize("options", [{}, {"overlap_grad_reduce": False}, {"bucket_cap_mb": 1e-4}])
@pytest.mark.parametrize(("P", "K"), [(1, 1), (1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("method", METHODS)
def test_equals_plain_torch(run, method: str, P: int, K: int, options: dict[str, Any]) -> None:
    new, as_one = METHODS[method]
    ranks = run(P * K, lambda world: trained(world, P, new, **options))
    plain = expected(1, P * K, STEPS + 1) if as_one else expected(P, K, EVERY)
    for t, groups in enumerate(plain):
        for rank, history in enumerate(ranks):
            torch.testing.assert_close(history[t], groups[rank * len(groups) // (P * K)], rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", [2])
def test_what_else_the_distributed_optimizer_has(run, n: int) -> None:
    def used(world: Communicator) -> tuple[float, int, list[str]]:
        topology, net = form(world, groups=n), model()
        optimizer = NaturalGradient(DistributedOptimizer(momentum(net), net, topology, hierarchical(2)), net)
        optimizer.zero_grad()
        loss(net, *batch(0, topology.rank)).backward()
        norm = optimizer.clip_grad_norm_(1e-3)
        assert norm > 1e-3
        optimizer.step()
        with optimizer.averaged_model() as distance:
            assert distance > 0
        loss(net, *batch(1, topology.rank)).backward()
        optimizer.step()
        return optimizer.metrics["distance"], optimizer.t, sorted(optimizer.state_dict())

    for distance, t, keys in run(n, used):
        assert distance > 0
        assert (t, keys) == (2, ["hpcsgd", "natural_gradient", "param_groups", "state"])


@pytest.mark.parametrize(("P", "K"), [(1, 1), (2, 1), (1, 2)])
def test_state_survives_a_round_trip(run, P: int, K: int) -> None:
    def whole_and_resumed(world: Communicator) -> tuple[Tensor, Tensor]:
        topology = form(world, groups=P)

        def new() -> tuple[nn.Module, NaturalGradient]:
            net = model()
            distributed = DistributedOptimizer(momentum(net), net, topology, hierarchical(EVERY))
            return net, NaturalGradient(distributed, net, **OPTIONS)

        net, optimizer = new()
        for t in range(4):
            one_step(net, optimizer, topology, t)
        weights, state = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
        for t in range(4, STEPS):
            one_step(net, optimizer, topology, t)
        again, resumed = new()
        again.load_state_dict(weights)
        resumed.load_state_dict(state)
        for t in range(4, STEPS):
            one_step(again, resumed, topology, t)
        return vector(net), vector(again)

    for whole, resumed in run(P * K, whole_and_resumed):
        assert torch.equal(whole, resumed)


@pytest.mark.ranks(1)
def test_it_is_the_outermost(run) -> None:
    def wrong_order(world: Communicator) -> None:
        net = model()
        inside = hpcsgd.NaturalGradient(momentum(net), net)
        DistributedOptimizer(inside, net, form(world), bsp())

    line = r"NaturalGradient goes outside: NaturalGradient\(DistributedOptimizer\(optimizer, ...\), model\)"
    with pytest.raises(UserError, match=line):
        run(1, wrong_order)
