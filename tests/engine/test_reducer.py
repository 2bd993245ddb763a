"""Gradients are sent in the order of the buckets, during the backward pass, and are never stale."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from hpcsgd import DistributedOptimizer, Method, Sparse, TopK, UserError, bsp
from hpcsgd.comm import Communicator
from hpcsgd.comm.stats import activity
from hpcsgd.core.flat import Bucket
from hpcsgd.core.step import ReduceContext
from hpcsgd.core.topology import Topology, form
from hpcsgd.parts.averagers import Mean
from hpcsgd.parts.grad_reduces import AllReduce
from hpcsgd.parts.schedules import never
from references import batch, gathered_step, loss, one_step, vector
from references import model as make_model

SMALL = 1e-6
"""Megabytes per bucket, so few that every parameter has its own bucket."""


@dataclass
class Watched:
    """An allreduce that records the buckets, and whether the backward pass was over."""

    backward_over: list[bool] = field(default_factory=lambda: [False])
    seen: list[tuple[int, bool]] = field(default_factory=list)
    traits = AllReduce.traits

    def idle(self, topology: Topology) -> bool:
        return False

    def __call__(self, d: ReduceContext, b: Bucket) -> None:
        self.seen.append((list(d.buckets).index(b), self.backward_over[0]))
        AllReduce()(d, b)


def momentum(net: nn.Module) -> optim.Optimizer:
    return optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def watched(net: nn.Module, topology: Topology, **options: object) -> tuple[DistributedOptimizer, Watched]:
    grad_reduce = Watched()
    method = Method(grad_reduce, never, Mean())
    options = {"bucket_cap_mb": SMALL} | options
    return DistributedOptimizer(momentum(net), net, topology, method, **options), grad_reduce  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("overlap", [True, False])
def test_buckets_leave_in_order_and_during_the_backward_pass(run, n: int, overlap: bool) -> None:
    def train(world: Communicator) -> list[tuple[int, bool]]:
        net = make_model()
        optimizer, grad_reduce = watched(net, form(world), overlap_grad_reduce=overlap)
        loss(net, *batch(0, world.rank)).backward()
        optimizer.topology.world.run(lambda: None, "all that was sent").wait()
        grad_reduce.backward_over[0] = True
        optimizer.step()
        return grad_reduce.seen

    assert run(n, train) == [[(bucket, not overlap) for bucket in range(6)]] * n


@pytest.mark.ranks(2)
def test_what_is_sent_in_the_backward_pass_belongs_to_it(run) -> None:
    """While gradients are sent, `activity()` names the backward pass of their step."""

    def train(world: Communicator) -> set[str]:
        topology, net = form(world), make_model()
        found = set[str]()

        class Told(Watched):
            def __call__(self, d: ReduceContext, b: Bucket) -> None:
                found.add(activity()[0])
                super().__call__(d, b)

        method = Method(Told(), never, Mean())
        optimizer = DistributedOptimizer(momentum(net), net, topology, method, bucket_cap_mb=SMALL)
        for t in range(2):
            one_step(net, optimizer, topology, t)
        return found

    assert run(2, train) == [{"backward() of step 1", "backward() of step 2"}] * 2


class Switching(nn.Module):
    """A model in which the rank decides which layers are used, and in which order gradients are complete."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([make_model(seed=1), make_model(seed=2)])
        self.order = [0, 1]

    def forward(self, x: Tensor) -> Tensor:
        for number in self.order:
            x = nn.functional.pad(self.layers[number](x), (0, 2))
        return x[:, :3]


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("orders", [([0, 1], [1, 0]), ([0, 1], [1]), ([0], [1]), ([0], [])])
def test_ranks_may_use_their_layers_in_other_orders(run, n: int, orders: tuple[list[int], list[int]]) -> None:
    """A gradient that a rank lacks counts as zero there."""

    def backward(rank: int) -> Switching:
        net = Switching()
        net.order = orders[rank % 2]
        if net.order:
            loss(net, *batch(0, rank)).backward()
        return net

    def train(world: Communicator) -> tuple[list[int], Tensor]:
        net = Switching()
        net.order = orders[world.rank % 2]
        optimizer, grad_reduce = watched(net, form(world))
        if net.order:
            loss(net, *batch(0, world.rank)).backward()
        optimizer.step()
        return [bucket for bucket, _ in grad_reduce.seen], vector(net)

    nets = [backward(rank) for rank in range(n)]
    changes = [[torch.zeros_like(p) if p.grad is None else p.grad for p in net.parameters()] for net in nets]
    mean = torch.stack([torch.cat([x.reshape(-1) for x in change]) for change in changes]).mean(0)
    for buckets, w in run(n, train):
        assert buckets == list(range(12))
        torch.testing.assert_close(w, vector(nets[0]) - 0.1 * mean, rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_step_may_be_left_out_after_clipping(run, n: int, set_to_none: bool) -> None:
    """A script may skip a step after clipping, for example because the norm is not finite."""

    def train(world: Communicator) -> Tensor:
        net = make_model()
        optimizer = DistributedOptimizer(momentum(net), net, form(world), bsp(), bucket_cap_mb=SMALL)
        for t in range(5):
            optimizer.zero_grad(set_to_none)
            loss(net, *batch(t, world.rank)).backward()
            optimizer.clip_grad_norm_(100.0)
            optimizer.clip_grad_norm_(100.0)  # clipping again does not reduce again
            if t not in (1, 2):
                optimizer.step()
        return vector(net)

    net = make_model()
    optimizer = momentum(net)
    for t in (0, 3, 4):
        gathered_step(net, optimizer, t, range(n))
    for ours in run(n, train):
        torch.testing.assert_close(ours, vector(net), rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", [1, 2])
def test_a_model_may_be_wrapped_anew(run, n: int) -> None:
    """The hooks of the first wrapping must not send anything."""

    def train(world: Communicator) -> Tensor:
        topology, net = form(world), make_model()
        for start in (0, 3):
            optimizer = DistributedOptimizer(momentum(net), net, topology, bsp())
            for t in range(start, start + 3):
                one_step(net, optimizer, topology, t)
        return vector(net)

    net = make_model()
    for start in (0, 3):
        optimizer = momentum(net)
        for t in range(start, start + 3):
            gathered_step(net, optimizer, t, range(n))
    for ours in run(n, train):
        torch.testing.assert_close(ours, vector(net), rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("n", [2])
@pytest.mark.parametrize("options", [{}, {"overlap_param_gather": True}, {"gradient_accumulation_steps": 2}])
def test_nothing_stays_of_a_model_that_is_dropped(run, n: int, options: dict[str, Any]) -> None:
    """Otherwise several trainings in one process, as in a search, would need the memory of all of them."""

    def train(world: Communicator) -> list[bool]:
        topology, net = form(world), make_model()
        optimizer = DistributedOptimizer(momentum(net), net, topology, bsp(), **options)
        for t in range(2):
            optimizer.zero_grad()
            for _ in range(options.get("gradient_accumulation_steps", 1)):
                loss(net, *batch(t, world.rank)).backward()
            optimizer.step()
        kept = [weakref.ref(each) for each in (optimizer, net, next(net.parameters()))]
        del optimizer, net
        world.run(lambda: None, "what the lane holds until it is given more").wait()
        for turn in range(n):  # a collection does nothing while another thread collects
            if turn == world.rank:
                gc.collect()
            world.barrier()
        return [each() is None for each in kept]

    assert run(n, train) == [[True] * 3] * n


@pytest.mark.filterwarnings("ignore:Using backward")  # about the reference cycle
@pytest.mark.parametrize("n", [1, 2])
def test_gradients_with_a_graph_of_their_own(run, n: int) -> None:
    def train(world: Communicator) -> Tensor:
        topology, net = form(world), make_model()
        optimizer = DistributedOptimizer(momentum(net), net, topology, bsp())
        for t in range(3):
            optimizer.zero_grad()
            loss(net, *batch(t, world.rank)).backward(create_graph=True)
            optimizer.step()
        return vector(net)

    net = make_model()
    optimizer = momentum(net)
    for t in range(3):
        gathered_step(net, optimizer, t, range(n))
    for ours in run(n, train):
        torch.testing.assert_close(ours, vector(net), rtol=0, atol=1e-12)


@pytest.mark.ranks(2)
def test_sparse_gradients_are_refused(run) -> None:
    def train(world: Communicator) -> None:
        net = nn.Embedding(10, 3, sparse=True)
        DistributedOptimizer(optim.SGD(net.parameters(), 0.1), net, form(world), bsp())
        net(torch.tensor([1, 2])).sum().backward()

    with pytest.raises(UserError, match="gradient of weight is sparse"):
        run(2, train)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("warm", [False, True])
def test_a_backward_pass_is_not_captured(run, monkeypatch: pytest.MonkeyPatch, warm: bool) -> None:
    """A backward pass captured as a CUDA graph is refused, because a replay would not send the gradients.

    The error comes first, even if this pass replaces gradients that were sent, which is refused, too.
    """
    capturing = threading.local()
    monkeypatch.setattr("hpcsgd.engine.reducer.captured", lambda _: getattr(capturing, "now", False))

    def trained(world: Communicator) -> None:
        net = make_model()
        inner = optim.SGD(net.parameters(), lr=0.1)
        method = bsp(Sparse(TopK(density=0.5)))
        DistributedOptimizer(inner, net, form(world, groups=1), method)
        if warm:
            loss(net, *batch(0, world.rank)).backward()
            net.zero_grad()
        capturing.now = True
        loss(net, *batch(0, world.rank)).backward()

    with pytest.raises(UserError, match=r"captured as a CUDA graph, .*: train without CUDA graphs"):
        run(2, trained)
