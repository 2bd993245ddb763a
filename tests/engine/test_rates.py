"""Gradient reduction, update and synchronization use the same learning rate in a step, warm-up included."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn, optim

import hpcsgd
from hpcsgd.comm import Communicator, threads
from hpcsgd.core.flat import Bucket
from hpcsgd.core.step import ReduceContext, StepContext
from hpcsgd.core.topology import Topology, form
from hpcsgd.core.traits import ScheduleTraits
from hpcsgd.engine.lr import WarmUp
from hpcsgd.methods import Method, bsp, sasgd
from hpcsgd.parts.grad_reduces import AllToAll, LrInErrorFeedback, Sparse
from hpcsgd.parts.sparsifiers import Accumulated, Share, TopK
from local_methods import accumulating, gradients_of
from references import big_batch, model, one_step, same

LR, STEPS, CLIMBING, START = 0.2, 7, 4, 0.25
RATES = [LR * (START + (1 - START) * min(t, CLIMBING) / CLIMBING) for t in range(STEPS)]
WHERE = ["the inner optimizer before", "the inner optimizer after", "the wrapper"]


def warmed_up(
    world: Communicator, P: int, method: Method, around: str
) -> tuple[nn.Module, hpcsgd.DistributedOptimizer]:
    """Return a model and plain SGD with a learning-rate warm-up and small buckets."""
    net = model()
    inner = optim.SGD(net.parameters(), lr=LR)
    if around == WHERE[0]:
        WarmUp(inner, CLIMBING, START)
    wrapped = hpcsgd.DistributedOptimizer(inner, net, form(world, groups=P), method, bucket_cap_mb=1e-4)
    if around != WHERE[0]:
        WarmUp(inner if around == WHERE[1] else wrapped, CLIMBING, START)
    return net, wrapped


@dataclass(frozen=True)
class Late:
    """`inner`, but the shares are computed after the update has begun, whose rate is a different one."""

    inner: TopK
    begun: threading.Event
    disjoint = False

    def cut(self, layers: Tensor, n: int) -> Tensor:
        return self.inner.cut(layers, n)

    def share(self, x: Accumulated, t: int, workers: Communicator) -> Share:
        assert self.begun.wait(20)
        self.begun.clear()
        return self.inner.share(x, t, workers)

    def select(self, x: Accumulated, share: Share) -> Tensor:
        return self.inner.select(x, share)


@pytest.mark.parametrize("around", WHERE)
@pytest.mark.parametrize("n", [2, 4])
def test_the_rate_inside_is_fixed_when_gradients_leave(run, n: int, around: str) -> None:
    """All elements are sent, so training is that of plain SGD, however late the reduction runs."""

    def trained(world: Communicator) -> list[Tensor]:
        begun = threading.Event()
        grad_reduce = Sparse(Late(TopK(1.0), begun), feedback=LrInErrorFeedback())
        net, wrapped = warmed_up(world, 1, bsp(grad_reduce), around)
        wrapped.register_step_pre_hook(lambda *_: begun.set())
        return [one_step(net, wrapped, wrapped.topology, t) for t in range(STEPS)]

    def make(params: list[nn.Parameter]) -> optim.Optimizer:
        made = optim.SGD(params, lr=LR)
        WarmUp(made, CLIMBING, START)
        return made

    same(run(n, trained), [[w] for w in big_batch(n, make, STEPS)], n)


@pytest.mark.parametrize("around", WHERE)
@pytest.mark.parametrize(("P", "K"), [(2, 1), (2, 2), (4, 1)])
def test_sasgd_synchronizes_at_the_rate_of_the_step(run, P: int, K: int, around: str) -> None:
    def trained(world: Communicator) -> list[Tensor]:
        net, wrapped = warmed_up(world, P, sasgd(3), around)
        return [one_step(net, wrapped, wrapped.topology, t) for t in range(STEPS)]

    same(run(P * K, trained), accumulating(P, 3, RATES, gradients_of(K)), K)


@dataclass
class Never:
    """A schedule that never synchronizes and records the rate of each step."""

    asked: list[float]
    traits = ScheduleTraits()

    def __call__(self, s: StepContext) -> bool:
        self.asked.append(s.lr)
        return False


@dataclass
class Noting:
    """A mean of the gradients that records the learning rate it gets with every bucket."""

    seen: list[float]
    traits = replace(AllToAll.traits, per_bucket=False)

    def idle(self, topology: Topology) -> bool:
        return AllToAll().idle(topology)

    def __call__(self, d: ReduceContext, b: Bucket) -> None:
        self.seen.append(d.rates[0])
        AllToAll()(d, b)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("around", WHERE)
def test_schedules_and_gradient_reductions_see_it(run, around: str) -> None:
    def seen(world: Communicator) -> tuple[list[float], list[float], list[float]]:
        asked: list[float] = []
        grad_reduce = Noting([])
        method = Method(grad_reduce, Never(asked), sasgd(3).averager)
        net, wrapped = warmed_up(world, 2, method, around)
        due = []
        for t in range(STEPS):
            due.append(wrapped.rates[0])
            one_step(net, wrapped, wrapped.topology, t)
        buckets = len(wrapped.buckets)
        assert all(
            len(set(grad_reduce.seen[i : i + buckets])) == 1 for i in range(0, STEPS * buckets, buckets)
        )
        return asked, grad_reduce.seen[::buckets], due

    for asked, departed, due in run(4, seen):
        assert asked == due == pytest.approx(RATES, rel=1e-14)
        assert departed == asked


def test_a_warm_up_of_a_wrapper_counts_inside() -> None:
    net = model(dtype=torch.float32)

    def rates(world: Communicator) -> float:
        inner = optim.SGD(net.parameters(), lr=LR)
        wrapped = hpcsgd.DistributedOptimizer(inner, net, form(world), bsp())
        natural = hpcsgd.NaturalGradient(wrapped, net, rank=2)
        WarmUp(natural, 2, 0.5)
        rate = wrapped.rates[0]
        natural.remove()
        return rate

    assert threads.run(1, rates) == [LR / 2]
