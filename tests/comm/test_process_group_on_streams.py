"""Tests of the code for NCCL on the test device, with a process group that works in the order of streams."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from comm.ordering import PATIENCE, PROGRAMS, Program
from far.ranks import PATTERNS, explicitly
from far.stream_ordered import StreamOrdered, end_groups
from hpcsgd.comm import Backend, Communicator, process_group, threads
from hpcsgd.comm.by_device import ByDevice
from hpcsgd.comm.process_group import GroupBackend
from hpcsgd.comm.shutdown import close_libraries

RANKS = 2
BOTH_SEND_FIRST = {"send", "one_letter_after_the_other"}
"""Programs in which both ranks send first: on a stream they would wait for each other forever."""

pytestmark = pytest.mark.usefixtures("far_device")


@pytest.fixture(autouse=True)
def nccl_is_ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def made(library: str, store: Any, ranks: Backend, timeout: float) -> StreamOrdered:
        return StreamOrdered(store, ranks.rank, ranks.size, timedelta(seconds=timeout))

    monkeypatch.setattr(process_group, "_made", made)
    monkeypatch.setattr(process_group, "_named", lambda library: f"{library} of the tests")
    monkeypatch.setitem(process_group.LIBRARIES, "far", "nccl")
    yield
    close_libraries()
    end_groups()


def by_nccl(program: Program) -> Program:
    """Return `program` with a world that uses this process group for tensors on devices."""

    def on_a_rank(world: Communicator, device: torch.device | None = None) -> list[Tensor]:
        host = world.backend
        assert isinstance(host, ByDevice)
        make = lambda ranks: GroupBackend(ranks, "nccl", world.timeout)  # noqa: E731
        made = world.run(lambda: ByDevice(host.host, make), "meeting").wait()
        return program(world.with_backend(made, "nccl"), device)

    return on_a_rank


@pytest.mark.parametrize("program", sorted(PROGRAMS.keys() - BOTH_SEND_FIRST))
def test_whichever_stream_is_slow_the_bits_are_those_on_the_host(program: str) -> None:
    here = threads.run(RANKS, PROGRAMS[program], timeout=PATIENCE)
    for pattern, delays in PATTERNS.items():
        there = threads.run(RANKS, explicitly(by_nccl(PROGRAMS[program]), delays), timeout=PATIENCE)
        for mine, theirs in zip(here, there, strict=True):
            for x, y in zip(mine, theirs, strict=True):
                assert torch.equal(x, y), f"under the pattern {pattern!r}"
