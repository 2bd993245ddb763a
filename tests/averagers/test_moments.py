"""Momentum at meetings: kept, averaged or reset, each against plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import optim

from hpcsgd import Method, allreduce_local_sgd, hierarchical
from hpcsgd.averagers import Averaged, Reset, kept
from hpcsgd.transport import Transport
from references import average, distributed, gathered_step, vector
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


def zero(optimizers: Optimizers) -> None:
    for optimizer in optimizers:
        for state in optimizer.state.values():
            state["exp_avg"].zero_()
            state["exp_avg_sq"].zero_()


@pytest.mark.parametrize(("moments", "reference"), [(kept, leave), (Averaged, mean), (Reset, zero)])
@pytest.mark.parametrize(("P", "K"), [(2, 1), (2, 2), (4, 1), (2, 4)])
@pytest.mark.parametrize("method", [hierarchical, allreduce_local_sgd])
def test_moments(
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

    def train(world: Transport) -> torch.Tensor:
        made = method(EVERY, moments=moments)
        return distributed(world, P, made, lambda params: optim.Adam(params, lr=0.05), STEPS)[-1]

    for rank, ours in enumerate(run(P * K, train)):
        torch.testing.assert_close(ours, vector(nets[rank // K]), rtol=0, atol=1e-12)
