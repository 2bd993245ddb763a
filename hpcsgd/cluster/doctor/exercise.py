"""Short communication between all ranks, to check its results and measure its speed."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from hpcsgd.cluster.doctor.finding import Finding, error, numbers, ok
from hpcsgd.comm import Communicator
from hpcsgd.comm.streams import on_accelerator, settle
from hpcsgd.errors import count_text

TYPES = (torch.float32, torch.float64, torch.bfloat16)
LENGTH = 1000  # elements for each rank in a test of correctness
SMALL_ROUNDS = 50
LARGE_ROUNDS = 3
LARGE_BYTES = 8 << 20


def exercise(world: Communicator) -> list[Finding]:
    """Return the findings about results and speed, the same on every rank; collective."""
    if world.size == 1:
        return [ok("exercise: one rank does not communicate")]
    return [
        _judge(world, "ring exchange", {"int64": ring(world)}),
        _judge(world, "allreduce", {_name(dtype): allreduce(world, dtype) for dtype in TYPES}),
        _judge(world, "alltoall", {_name(dtype): alltoall(world, dtype) for dtype in TYPES}),
        latency(world),
        bandwidth(world),
    ]


def ring(world: Communicator) -> bool:
    """Return True if this rank receives the message of the rank before it; collective."""
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    received = torch.empty(LENGTH, dtype=torch.int64)
    world.sendrecv({after: _pattern(world.rank)}, {before: received}).wait()
    return torch.equal(received, _pattern(before))


def allreduce(world: Communicator, dtype: torch.dtype) -> bool:
    """Return True if an allreduce is exact; sums are small integers, rounded once to `dtype`."""
    x = _pattern(world.rank).to(dtype)
    world.allreduce(x).wait()
    total = sum(_pattern(rank).double() for rank in range(world.size))
    assert isinstance(total, Tensor)
    return torch.equal(x, total.to(dtype))


def alltoall(world: Communicator, dtype: torch.dtype) -> bool:
    """Return True if this rank receives its part from every other rank; collective."""
    sent = torch.cat([_pattern(world.rank + to) for to in range(world.size)]).to(dtype)
    received = torch.empty_like(sent)
    world.alltoall(received, sent).wait()
    expected = torch.cat([_pattern(source + world.rank) for source in range(world.size)]).to(dtype)
    return torch.equal(received, expected)


def latency(world: Communicator) -> Finding:
    """Return a finding about the time of the smallest allreduce; collective."""
    x = torch.ones(1)
    seconds = slowest(world, median_seconds(lambda: world.allreduce(x).wait(), SMALL_ROUNDS))
    return ok(
        f"latency: allreduce of 4 bytes over {count_text(world.size, 'rank')} in {seconds * 1e6:,.0f} µs"
    )


def bandwidth(
    world: Communicator, what: str = "bandwidth", device: torch.device | None = None, size: int = LARGE_BYTES
) -> Finding:
    """Return a finding about the bytes per second of each rank in an all-to-all of `size` bytes."""
    sent = torch.ones(size // 4 // world.size * world.size, device=device)
    received = torch.empty_like(sent)

    def round_trip() -> None:
        world.alltoall(received, sent).wait()
        finish(device)

    seconds = slowest(world, median_seconds(round_trip, LARGE_ROUNDS))
    moved = sent.numel() * 4 * (world.size - 1) / world.size
    return ok(
        f"{what}: alltoall of {sent.numel() * 4 / 1e6:.1f} MB over {count_text(world.size, 'rank')} in "
        f"{seconds * 1e3:,.1f} ms, {moved / seconds / 1e9:.2f} GB/s out of each rank"
    )


def finish(device: torch.device | None) -> None:
    """Wait until `device`, if it is an accelerator, has done all its work."""
    if device is not None and on_accelerator(device):
        settle(device)


def _pattern(number: int) -> Tensor:
    """Return a message for a test, int64 [LENGTH]: it identifies its sender, and is exact in bfloat16."""
    return (torch.arange(LENGTH) * 3 + number) % 101


def _judge(world: Communicator, what: str, right: dict[str, bool]) -> Finding:
    """Return the finding of test `what`. `right` says for each dtype whether this rank's result is right."""
    answers = world.gather_objects(right)
    types = [name for name in right if not all(answer[name] for answer in answers)]
    if types:
        wrong = [rank for rank, answer in enumerate(answers) if not all(answer.values())]
        return error(
            f"{what} of {', '.join(types)}: wrong on rank {numbers(wrong)}; training would go wrong too: use "
            f"another MPI library or version than {world.backend.name}"
        )
    return ok(f"{what}: right on {count_text(world.size, 'rank')} ({', '.join(right)})")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def median_seconds(operation: Callable[[], object], rounds: int) -> float:
    """Return the median seconds of `operation`, after a first call that does not count."""
    operation()  # connections are made at first use
    durations: list[float] = []
    for _ in range(rounds):
        start = time.perf_counter()
        operation()
        durations.append(time.perf_counter() - start)
    return median(durations)


def slowest(world: Communicator, seconds: float) -> float:
    """Return the largest `seconds` of all ranks; collective."""
    return max(world.gather_objects(seconds))
