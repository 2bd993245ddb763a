"""Lanes that send without a pause, to see what computing takes beside them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator

import torch

from hpcsgd.comm import Communicator

BYTES = 4_000_000
"""Of an all-to-all: a rank sends that again and again."""


@contextlib.contextmanager
def busy(world: Communicator) -> Generator[None, None, None]:
    """Inside the block every rank's lane is at work, as in a backward pass; collective."""
    control = world.dup_with_thread()
    over = threading.Event()
    work = control.run(lambda: _send(control, over), "keeping the lane busy")
    try:
        yield
    finally:
        over.set()
    work.wait()


def _send(comm: Communicator, over: threading.Event) -> None:
    """Until all ranks are through: whoever left alone would leave the others waiting."""
    sent = torch.ones(-(-BYTES // (4 * comm.size)) * comm.size)
    received = torch.ones_like(sent)
    working = torch.ones(1)
    while working.item():
        comm.alltoall(received, sent).wait()
        working.fill_(not over.is_set())
        comm.allreduce(working, "max").wait()
