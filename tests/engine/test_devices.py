"""Training steps on a device: what the host waits for, what overlaps, and which streams are used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch import Tensor, nn, optim

import hpcsgd
from comm.broken_order import of_the_default_stream
from far.ranks import FOR_TRAININGS, Delays, explicitly, on_the_host
from hpcsgd.comm import Communicator, comm_thread, streams, threads
from hpcsgd.core.topology import form
from hpcsgd.methods import Method, bsp, hierarchical
from hpcsgd.parts.grad_reduces import AllReduce
from references import batch, loss, model, vector

pytestmark = pytest.mark.usefixtures("far_device")

BUCKETS = 3
"""Number of buckets of the model with the `bucket_cap_mb` used here."""


class Training:
    """A training of the small model in P groups, with several buckets, on a device or on the host."""

    def __init__(self, world: Communicator, P: int, method: Method, device: torch.device | None) -> None:
        self.topology = form(world, P)
        self.device = device or torch.device("cpu")
        self.net = model(world.rank).to(self.device)
        inner = optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.optimizer = hpcsgd.DistributedOptimizer(
            inner, self.net, self.topology, method, bucket_cap_mb=1e-4
        )
        assert len(self.optimizer.buckets) == BUCKETS

    def batch(self, t: int) -> tuple[Tensor, Tensor]:
        x, y = batch(t, self.topology.rank)
        return x.to(self.device), y.to(self.device)

    def step(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        loss(self.net, x, y).backward()
        self.optimizer.step()


def waits(world: Communicator, P: int, device: torch.device) -> list[list[str]]:
    """Return, for each step, what the host waited for."""
    training = Training(world, P, hierarchical(sync_every=2), device)
    found = []
    for t in range(4):
        x, y = training.batch(t)
        world.barrier()
        torch.ops.far.forget_waits()
        world.barrier()
        training.step(x, y)
        found.append(torch.ops.far.waits(device.index))
        world.barrier()
    return found


@pytest.mark.threads(unless={"P": 2, "K": 2})
@pytest.mark.parametrize(("P", "K"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_the_host_waits_for_the_staging_alone(run, P: int, K: int) -> None:
    """The host waits once for each message that is copied to it.

    Within a group these are the gradients and then the parameters of every bucket. At a synchronization these
    are the averaged values of every bucket, and the model distance.
    """
    within = ["event"] * BUCKETS if K > 1 else []
    synchronization = [*["event"] * BUCKETS, "copy"] if P > 1 else []
    for rank in run(P * K, explicitly(waits), P):
        for t, found in enumerate(rank):  # the copy may come before or among the gathers
            assert sorted(found) == sorted([*within, *synchronization * (t % 2), *within])


LAYERS = 8
"""Each layer is a bucket."""


def step_time(world: Communicator, operation: float, copy: float, device: torch.device) -> float:
    """Return the device's milliseconds per step, given the microseconds per operation and per copy."""
    net = nn.Sequential(*(part for _ in range(LAYERS) for part in (nn.Linear(5, 5), nn.Tanh()))).to(device)
    inner = optim.SGD(net.parameters(), lr=0.1)
    topology = form(world, 1)
    optimizer = hpcsgd.DistributedOptimizer(
        inner, net, topology, bsp(grad_reduce=AllReduce()), bucket_cap_mb=1e-4
    )
    assert len(optimizer.buckets) == LAYERS
    x = torch.ones(3, 5, device=device)
    first, last = (torch.Event(device, enable_timing=True) for _ in range(2))
    for begin in (0, 1):  # the first step allocates what later steps reuse
        world.barrier()
        torch.accelerator.synchronize(device)
        torch.ops.far.costs(operation * begin, copy * begin)
        world.barrier()
        first.record(torch.accelerator.current_stream(device))
        optimizer.zero_grad()
        net(x).sum().backward()
        optimizer.step()
        last.record(torch.accelerator.current_stream(device))
        last.synchronize()
    return first.elapsed_time(last)


def hidden() -> float:
    """Return the fraction of the copy time that is hidden behind computation.

    The copies take a quarter of the time of the operations, which is less than the backward pass.
    """

    def measured(operation: float, copy: float) -> float:
        return max(threads.run(2, explicitly(step_time), operation, copy))

    operations, copies = measured(1_000.0, 0.0), measured(0.0, 1_000.0)
    assert copies == 2 * LAYERS  # to the host and back
    share = operations / 4
    return 1 - (measured(1_000.0, 1_000.0 * share / copies) - operations) / share


def test_copies_are_made_while_the_device_computes() -> None:
    """All copies overlap with computation except those of the last bucket, after which nothing is computed.

    The times are those of the device's events and do not depend on the load of the machine.
    """
    assert hidden() >= 1 - 1 / LAYERS - 1e-6


def waiting(init: Callable[..., None]) -> Callable[..., None]:
    def begin(work: comm_thread.Work, *arguments: object, **named: object) -> None:
        init(work, *arguments, **named)
        work.wait()

    return begin


ONE_STREAM: Mapping[str, tuple[object, str, Callable[..., object]]] = {
    "the lane works on the asker's stream": (streams.Streams, "on", lambda *_: nullcontext()),
    "the asker waits at once": (comm_thread.Work, "__init__", waiting(comm_thread.Work.__init__)),
}
"""Changes that keep the results right but prevent any overlap."""


@pytest.mark.parametrize("mutant", ONE_STREAM)
def test_what_overlaps_with_nothing_is_seen(mutant: str) -> None:
    with mock.patch.object(*ONE_STREAM[mutant]):
        assert hidden() == pytest.approx(0.0, abs=1e-6)


def on_a_stream_of_its_own(world: Communicator, device: torch.device | None = None) -> Tensor:
    with nullcontext() if device is None else torch.Stream(device):
        training = Training(world, 1, bsp(), device)
        for t in range(2):
            training.step(*training.batch(t))
        return on_the_host(vector(training.net))


class Forked(nn.Module):
    """A model of which one half is computed on another stream."""

    def __init__(self) -> None:
        super().__init__()
        self.here, self.there = model(1), model(2)
        self.stream: torch.Stream | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.stream is None:
            return self.here(x) + self.there(x)
        current = torch.accelerator.current_stream(x.device)
        self.stream.wait_stream(current)
        with self.stream:
            there = self.there(x)
        here = self.here(x)
        current.wait_stream(self.stream)
        there.record_stream(current)
        return here + there


def on_two_streams(world: Communicator, device: torch.device | None = None) -> Tensor:
    net = Forked().to(device)
    inner = optim.SGD(net.parameters(), lr=0.1)
    optimizer = hpcsgd.DistributedOptimizer(inner, net, form(world, 1), bsp())
    net.stream = None if device is None else torch.Stream(device)
    for t in range(2):
        x, y = (part.to(device) for part in batch(t, world.rank))
        optimizer.zero_grad()
        loss(net, x, y).backward()
        optimizer.step()
    return vector(net)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("pattern", FOR_TRAININGS)
@pytest.mark.parametrize("train", [on_a_stream_of_its_own, on_two_streams])
def test_hooks_go_by_the_stream_that_a_gradient_was_made_on(
    run, train: Callable[..., Tensor], pattern: str
) -> None:
    here = run(2, train)
    there = run(2, explicitly(train, FOR_TRAININGS[pattern]))
    for mine, theirs in zip(here, there, strict=True):
        assert torch.equal(mine, theirs)


HOOKS: Mapping[str, tuple[Callable[..., Tensor], tuple[object, str, Callable[..., object]]]] = {
    "hooks go by the default stream": (
        on_a_stream_of_its_own,
        (streams.StreamEvent, "__init__", of_the_default_stream),
    ),
    "a bucket leaves behind its last gradient alone": (
        on_two_streams,
        (streams.Confluence, "precede", lambda _: None),
    ),
}


@pytest.mark.parametrize("mutant", HOOKS)
def test_hooks_on_the_wrong_stream_are_seen(mutant: str) -> None:
    train, broken = HOOKS[mutant]
    here = threads.run(2, train)

    def differs(delays: Delays, slower: int) -> bool:
        there = threads.run(2, explicitly(train, {stream: slower * us for stream, us in delays.items()}))
        return not all(torch.equal(mine, theirs) for mine, theirs in zip(here, there, strict=True))

    with mock.patch.object(*broken):
        assert any(differs(delays, slower) for slower in (1, 10) for delays in FOR_TRAININGS.values())
