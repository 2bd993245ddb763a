"""Keep communication threads busy, to measure how much they slow down computation."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator

import torch

from hpcsgd.comm import Communicator

BYTES = 4_000_000
"""Bytes that each rank sends in each of the repeated all-to-alls."""


@contextlib.contextmanager
def busy(world: Communicator) -> Generator[None, None, None]:
    """Keep a communication thread of every rank busy inside the block, as in a backward pass. Collective."""
    control = world.dup_with_thread()
    over = threading.Event()
    work = control.run(lambda: _send(control, over), "keeping the communication thread busy")
    try:
        yield
    finally:
        over.set()
    work.wait()


def _send(comm: Communicator, over: threading.Event) -> None:
    """Repeat all-to-alls until `over` is set on all ranks.

    If a rank stopped before the others, these would wait for it forever.
    """
    sent = torch.ones(-(-BYTES // (4 * comm.size)) * comm.size)
    received = torch.ones_like(sent)
    working = torch.ones(1)
    while working.item():
        comm.alltoall(received, sent).wait()
        working.fill_(not over.is_set())
        comm.allreduce(working, "max").wait()
