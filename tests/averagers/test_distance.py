"""D = (1/P) Σ_i ‖W_i − W̄‖₂ (eq. 9) as noted at meetings, against P single processes in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import optim

from hpcsgd import DistributedOptimizer, Method, allreduce_local_sgd, hierarchical
from hpcsgd.core.topology import form
from hpcsgd.transport import Transport
from references import average, gathered_step, one_step, vector
from references import model as make_model

EVERY, STEPS = 2, 6


def expected(P: int, K: int) -> list[float]:
    nets = [make_model() for _ in range(P)]
    optimizers = [optim.SGD(net.parameters(), lr=0.2) for net in nets]
    found = []
    for t in range(STEPS):
        for g, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            gathered_step(net, optimizer, t, range(g * K, (g + 1) * K))
        if (t + 1) % EVERY == 0:
            W = torch.stack([vector(net) for net in nets])
            found.append((W - W.mean(0)).norm(dim=1).mean().item())
            average(nets)
    return found


@pytest.mark.parametrize(("P", "K"), [(2, 1), (2, 2), (4, 1), (4, 2)])
@pytest.mark.parametrize("method", [hierarchical, allreduce_local_sgd])
def test_distance(run, P: int, K: int, method: Callable[[int], Method]) -> None:
    def noted(world: Transport) -> list[float]:
        job, net = form(world, groups=P), make_model()
        optimizer = DistributedOptimizer(optim.SGD(net.parameters(), lr=0.2), net, job, method(EVERY))
        found = []
        for t in range(STEPS):
            one_step(net, optimizer, job, t)
            assert ("distance" in optimizer.notes) == ((t + 1) % EVERY == 0)
            found += optimizer.notes.values()
        return found

    plain = expected(P, K)
    for distances in run(P * K, noted):
        assert distances == pytest.approx(plain, abs=1e-12)
