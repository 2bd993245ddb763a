"""Small programs each of which depends on a rule of order between streams."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor

from far.ranks import on_the_host
from hpcsgd.comm import Communicator, Work
from hpcsgd.comm.backend import Backend

LENGTH = 64
PATIENCE = 60.0  # seconds; the machine may be busy

Operation = Callable[[Communicator, Tensor], Tensor]
Program = Callable[..., list[Tensor]]
"""A function of a world of two ranks and a `device`; its result does not depend on the device."""


def late(world: Communicator, device: torch.device | None) -> Tensor:
    """Return numbers of this rank whose computation may still be running on the device."""
    x = torch.arange(LENGTH, dtype=torch.float32, device=device)
    return x.add_(world.rank).mul_(2).add_(1)


def alltoall(world: Communicator, x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    world.alltoall(out, x).wait()
    return out


def reduce_scatter(world: Communicator, x: Tensor) -> Tensor:
    out = x.new_empty(len(x) // world.size)
    world.reduce_scatter(out, x, "mean").wait()
    return out


def allgather(world: Communicator, x: Tensor) -> Tensor:
    out = x.new_empty(len(x) * world.size)
    world.allgather(out, x).wait()
    return out


def allgatherv(world: Communicator, x: Tensor) -> Tensor:
    counts = [len(x) - rank for rank in range(world.size)]
    out = x.new_empty(sum(counts))
    world.allgatherv(out, x[: counts[world.rank]], counts).wait()
    return out


def allreduce(world: Communicator, x: Tensor) -> Tensor:
    world.allreduce(x).wait()
    return x


def bcast(world: Communicator, x: Tensor) -> Tensor:
    world.bcast(x, root=1).wait()
    return x


def sendrecv(world: Communicator, x: Tensor) -> Tensor:
    out, other = torch.empty_like(x), 1 - world.rank
    world.sendrecv({other: x}, {other: out}).wait()
    return out


def send(world: Communicator, x: Tensor) -> Tensor:
    out, other = torch.empty_like(x), 1 - world.rank
    sent = world.send(x, other)
    world.recv(out, other).wait()
    sent.wait()
    return out


OPERATIONS: Mapping[str, Operation] = {
    call.__name__: call
    for call in (alltoall, reduce_scatter, allgather, allgatherv, allreduce, bcast, sendrecv, send)
}


def with_result(operation: Operation) -> Program:
    """Return a program that sends a tensor still being computed, and uses the received one at once."""

    def program(world: Communicator, device: torch.device | None = None) -> list[Tensor]:
        return [operation(world, late(world, device)) * 3]

    return program


def in_flight(world: Communicator, device: torch.device | None = None) -> list[Tensor]:
    xs = [late(world, device) * i for i in range(3)]
    works = [world.allreduce(x) for x in xs]
    for work in works:
        work.wait()
    return [x + 1 for x in xs]


def one_letter_after_the_other(world: Communicator, device: torch.device | None = None) -> list[Tensor]:
    other = 1 - world.rank
    sent = [world.send(late(world, device) * i, other) for i in range(3)]
    received = [late(world, device) for _ in sent]
    for out in received:
        world.recv(out, other).wait()
    for work in sent:
        work.wait()
    return received


def run_on_the_comm_thread(world: Communicator, device: torch.device | None = None) -> list[Tensor]:
    """Run blocking code with operations in it on the communication thread, and use its result."""
    x = late(world, device)

    def call() -> Tensor:
        y = x * 2
        world.allreduce(y).wait()
        return y + 1

    return [world.run(call, "a call", x).wait() * 2]


def handed_over(world: Communicator, device: torch.device | None = None) -> list[Tensor]:
    """Begin an operation on one communication thread, and continue it on another one."""
    x, across = late(world, device), world.split(0, world.rank).with_own_thread()

    def call() -> Work:
        return across.allreduce(x.mul_(2))

    world.run(call, "a call", x).wait()
    return [x * 3]


def result_let_go(world: Communicator, device: torch.device | None = None) -> list[Tensor]:
    """Free the first call's result while it is still read, and allocate memory in the second call."""
    x, free = late(world, device), threading.Event()

    def second() -> Tensor:
        assert free.wait(PATIENCE)
        return torch.full_like(x, 77.0)

    works = [world.run(lambda: x * 2, "first", x), world.run(second, "second", x)]
    result = works[0].wait()
    read = result + 1
    del result
    free.set()
    return [read, works[1].wait()]


def own_stream(world: Communicator, device: torch.device | None = None) -> list[Tensor]:
    """Run all operations on a stream that the program has created."""
    with stream_on(device):
        return on_the_host(in_flight(world, device))


def waited_for_elsewhere(world: Communicator, device: torch.device | None = None) -> list[Tensor]:
    """Begin an operation on one stream, and wait for it and use its result on another one."""
    x = late(world, device)
    other = stream_on(device)
    work = world.allreduce(x)
    with other:
        work.wait()
        return [(x * 3).cpu()]


def stream_on(device: torch.device | None) -> AbstractContextManager[Any]:
    where = torch.get_default_device() if device is None else device
    return contextlib.nullcontext() if where.type == "cpu" else torch.Stream(where)


class Later:
    """The part of a backend that `dropped` needs: two ranks that send each other the same tensor.

    It makes copies on the current stream and, like NCCL, does not wait for them.
    """

    name, rank, size, node = "later", 0, 2, 0

    def accepts(self, device: torch.device) -> bool:
        return True

    def alltoall(self, out: Tensor, x: Tensor) -> None:
        out.copy_(x)


def dropped(world: Communicator, device: torch.device | None = None) -> list[Tensor]:
    """Keep no reference to the sent tensor except the operation's, while other tensors need memory."""
    later = Communicator(cast(Backend, Later()), timeout=PATIENCE)
    out = late(world, device)
    work = later.alltoall(out, late(world, device))
    while not work.done():  # waits for the host's part of the operation
        time.sleep(0.001)
    other = torch.full_like(out, 77.0)
    work.wait()
    later.comm_thread.close(PATIENCE)
    return [out * 1, other]


PROGRAMS: Mapping[str, Program] = {
    **{name: with_result(operation) for name, operation in OPERATIONS.items()},
    **{
        program.__name__: program
        for program in (
            in_flight, one_letter_after_the_other, run_on_the_comm_thread, handed_over, result_let_go,
            own_stream, waited_for_elsewhere, dropped,
        )
    },
}  # fmt: skip
