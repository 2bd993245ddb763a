"""Files of rank 0's that take as long as they take."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait

import torch

from hpcsgd.comm import Communicator
from hpcsgd.core.topology import raise_on_all_ranks

BEAT = 1.0
"""Seconds between two times that rank 0 says that it is at work, at most."""


def by_rank_0(world: Communicator, what: str, call: Callable[[], None]) -> None:
    """Have rank 0 carry out `call`, which communicates with nobody; collective.

    The others wait however long that takes, but no longer than the timeout for a rank 0 that says nothing:
    the call has a thread of its own.

    Raises:
        JobError: On all ranks, where the call raises.
    """
    under_way = Future[None]()
    if world.rank == 0:
        threading.Thread(target=_carry_out, args=(call, under_way), name=what, daemon=True).start()
    said = torch.zeros(1, dtype=torch.int64, device="cpu")  # whether it is done
    while not said.item():
        if world.rank == 0:
            wait([under_way], min(BEAT, world.timeout / 4))
            said.fill_(under_way.done())
        world.bcast(said).wait()
    with raise_on_all_ranks(world, what):
        if world.rank == 0:
            under_way.result()


def _carry_out(call: Callable[[], None], under_way: Future[None]) -> None:
    try:
        under_way.set_result(call())
    except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
        under_way.set_exception(error)
