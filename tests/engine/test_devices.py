"""Training steps on a device: what they wait for, what they do at the same time, and on whose streams."""

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
"""Of the model with `bucket_cap_mb` as here."""


class Training:
    """Of the small model in P groups, in several buckets, on a device or on the host."""

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
    """Of each step, what the host waited for."""
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
    """Once for each message that goes down: of every bucket the gradients and then the parameters, within a
    group; where groups meet, what they average of every bucket, and how far apart they are."""
    within = ["event"] * BUCKETS if K > 1 else []
    meeting = [*["event"] * BUCKETS, "copy"] if P > 1 else []
    for rank in run(P * K, explicitly(waits), P):
        for t, found in enumerate(rank):  # the copy may come before what is gathered, or among it
            assert sorted(found) == sorted([*within, *meeting * (t % 2), *within])


LAYERS = 8
"""Each of them a bucket."""


def step_time(world: Communicator, operation: float, copy: float, device: torch.device) -> float:
    """Milliseconds of the device for one step in which an operation and a copy take so many microseconds."""
    net = nn.Sequential(*(part for _ in range(LAYERS) for part in (nn.Linear(5, 5), nn.Tanh()))).to(device)
    inner = optim.SGD(net.parameters(), lr=0.1)
    topology = form(world, 1)
    optimizer = hpcsgd.DistributedOptimizer(
        inner, net, topology, bsp(grad_reduce=AllReduce()), bucket_cap_mb=1e-4
    )
    assert len(optimizer.buckets) == LAYERS
    x = torch.ones(3, 5, device=device)
    first, last = (torch.Event(device, enable_timing=True) for _ in range(2))
    for begin in (0, 1):  # the first step makes what the others have
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
    """Of the time that copies take, the share by which a step is not longer than without them.

    They take a quarter of what the operations take, which is less than the backward pass.
    """

    def measured(operation: float, copy: float) -> float:
        return max(threads.run(2, explicitly(step_time), operation, copy))

    operations, copies = measured(1_000.0, 0.0), measured(0.0, 1_000.0)
    assert copies == 2 * LAYERS  # down and up again
    share = operations / 4
    return 1 - (measured(1_000.0, 1_000.0 * share / copies) - operations) / share


def test_copies_are_made_while_the_device_computes() -> None:
    """All but those of the last bucket: nothing is left to be computed beside them. The time is that of the
    device's events, so that it does not matter how busy this machine is."""
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
"""Right, and with nothing at the same time."""


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
    """One half is computed on another stream."""

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
