"""SASGD is compared with its definition."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, optim

import hpcsgd
from hpcsgd.comm import Communicator, threads
from hpcsgd.core.topology import form
from hpcsgd.errors import UserError
from hpcsgd.methods import (
    Method,
    bsp,
    hierarchical,
    sasgd,
    switch,
)
from hpcsgd.parts.grad_reduces import AllReduce, AllToAll
from local_methods import accumulating, gradients_of
from methods.test_battery import OPTIMIZERS
from references import (
    MakeOptimizer,
    big_batch,
    distributed,
    local_sgd,
    model,
    one_step,
    same,
)

EVERY, STEPS = 3, 8
SHAPES = [(1, 2), (2, 1), (2, 2), (4, 1)]
SGD = OPTIMIZERS["SGD"]


def plainly(world: Communicator, P: int, method: Method, rates: list[float]) -> list[Tensor]:
    """Train with plain SGD and the given learning rate in every step."""
    topology, net = form(world, groups=P), model(seed=world.rank)
    optimizer = hpcsgd.DistributedOptimizer(optim.SGD(net.parameters(), lr=1.0), net, topology, method)
    history = []
    for t, lr in enumerate(rates):
        optimizer.param_groups[0]["lr"] = lr
        history.append(one_step(net, optimizer, topology, t))
    return history


RATES = [0.1, 0.1, 0.3, 0.2, 0.2, 0.05, 0.1, 0.1]


@pytest.mark.parametrize("grad_reduce", [AllToAll(), AllReduce()])
@pytest.mark.parametrize(("P", "K"), [*SHAPES, (4, 2)])
def test_accumulated_gradients_move_the_agreed_model(run, P: int, K: int, grad_reduce: Any) -> None:
    """The model moves only at a synchronization, although learning rates differ between steps."""
    ranks = run(P * K, lambda world: plainly(world, P, sasgd(EVERY, grad_reduce), RATES))
    same(ranks, accumulating(P, EVERY, RATES, gradients_of(K)), K)
    if P > 1:
        averaging = run(P * K, lambda world: plainly(world, P, hierarchical(EVERY), RATES))
        assert not torch.allclose(averaging[0][2], ranks[0][2], rtol=0, atol=1e-4)
        assert all(torch.equal(ranks[0][2], history[2]) for history in ranks)


@pytest.mark.parametrize(("P", "K"), SHAPES)
def test_at_a_constant_rate_it_is_local_sgd(run, P: int, K: int) -> None:
    ranks = run(P * K, lambda world: distributed(world, P, sasgd(EVERY), SGD, STEPS))
    same(ranks, local_sgd(P, K, EVERY, SGD, STEPS), K)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (OPTIMIZERS["momentum"], r"the optimizer is SGD with momentum = 0.9; expected plain SGD"),
        (lambda params: optim.SGD(params, lr=0.1, weight_decay=1e-3), r"SGD with weight_decay = 0.001"),
        (lambda params: optim.SGD(params, lr=0.1, maximize=True), r"SGD with maximize = True"),
        (OPTIMIZERS["AdamW"], r"the optimizer is AdamW with weight_decay = 0.1; expected plain SGD"),
        (optim.Adam, r"the optimizer is Adam; expected plain SGD"),
        (
            lambda params: optim.SGD([{"params": params[:1], "lr": 0.2}, {"params": params[1:]}], lr=0.1),
            r"lr = 0.1, 0.2: one learning rate",
        ),
    ],
)
def test_what_plain_sgd_is_not(run, make: MakeOptimizer, message: str) -> None:
    """The error is raised in the first step, before any update; with one group nothing is accumulated."""
    for method in (sasgd(EVERY), switch(bsp(), sasgd(EVERY), at=0)):
        with pytest.raises(UserError, match=message) as caught:
            run(2, lambda world, method=method: distributed(world, 2, copy.deepcopy(method), make, 1))
        assert "\n" not in str(caught.value)
    (history,) = threads.run(1, lambda world: distributed(world, 1, sasgd(EVERY), make, STEPS))
    torch.testing.assert_close(history, big_batch(1, make, STEPS), rtol=0, atol=1e-12)
