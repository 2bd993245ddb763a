"""D = (1/P) Σ_i ‖W_i − W̄‖₂ (eq. 9) in the metrics of synchronizations equals that of plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from torch import Tensor, nn, optim

from hpcsgd import DistributedOptimizer, Method, allreduce_local_sgd, hierarchical
from hpcsgd.comm import Communicator
from hpcsgd.core.averager import Traits
from hpcsgd.core.step import StepContext
from hpcsgd.core.topology import form
from hpcsgd.core.waits import All
from hpcsgd.parts.averagers import Mean, WithDistance
from hpcsgd.parts.averagers.mean import AT_ONCE
from hpcsgd.parts.grad_reduces import AllToAll
from hpcsgd.parts.schedules import Every
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
    def noted(world: Communicator) -> list[float]:
        topology, net = form(world, groups=P), make_model()
        optimizer = DistributedOptimizer(optim.SGD(net.parameters(), lr=0.2), net, topology, method(EVERY))
        found = []
        for t in range(STEPS):
            one_step(net, optimizer, topology, t)
            assert ("distance" in optimizer.metrics) == ((t + 1) % EVERY == 0)
            found += optimizer.metrics.values()
        return found

    plain = expected(P, K)
    for distances in run(P * K, noted):
        assert distances == pytest.approx(plain, abs=1e-12)


class Watched:
    """`Mean`, which records the most buckets under way at once, because copies of so many are kept."""

    traits = Traits(All(), reads_gradients=False, leaves_mean=True)

    def __init__(self) -> None:
        self.begun = self.arrived = self.most = 0

    def average(self, vectors: Iterable[Tensor], s: StepContext) -> Iterator[Tensor]:
        for w in Mean().average(map(self._count, vectors), s):
            self.arrived += 1
            yield w

    def _count(self, w: Tensor) -> Tensor:
        self.begun += 1
        self.most = max(self.most, self.begun - self.arrived)
        return w


@pytest.mark.ranks(2)
def test_copies_are_kept_of_few_buckets(run) -> None:
    def most(world: Communicator) -> tuple[int, int]:
        net = nn.Sequential(*(nn.Linear(3, 3) for _ in range(2 * AT_ONCE)))
        watched = Watched()
        method = Method(AllToAll(), Every(1), WithDistance(watched))
        optimizer = DistributedOptimizer(
            optim.SGD(net.parameters(), lr=0.1), net, form(world, groups=2), method, bucket_cap_mb=1e-6
        )
        net(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return watched.arrived, watched.most

    assert run(2, most) == [(4 * AT_ONCE, AT_ONCE)] * 2
