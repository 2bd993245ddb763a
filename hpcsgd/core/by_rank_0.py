"""Tasks of rank 0, such as writing files, that may take longer than the timeout."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait

import torch

from hpcsgd.comm import Communicator
from hpcsgd.core.topology import raise_on_all_ranks

BEAT = 1.0
"""Most seconds between two signs of life that rank 0 sends while it works."""


def by_rank_0(world: Communicator, what: str, call: Callable[[], None]) -> None:
    """Run `call` on rank 0 only, while the other ranks wait; collective.

    The call communicates with no other rank, and runs in its own thread. The other ranks wait as long as it
    takes. They give up if rank 0 sends no sign of life for as long as the timeout.

    Raises:
        JobError: On all ranks, if the call raises.
    """
    under_way = Future[None]()
    if world.rank == 0:
        threading.Thread(target=_carry_out, args=(call, under_way), name=what, daemon=True).start()
    is_done = torch.zeros(1, dtype=torch.int64, device="cpu")  # 1 once the call is done
    while not is_done.item():
        if world.rank == 0:
            wait([under_way], min(BEAT, world.timeout / 4))
            is_done.fill_(under_way.done())
        world.bcast(is_done).wait()
    with raise_on_all_ranks(world, what):
        if world.rank == 0:
            under_way.result()


def _carry_out(call: Callable[[], None], under_way: Future[None]) -> None:
    try:
        under_way.set_result(call())
    except BaseException as error:  # noqa: BLE001 - raised again by `under_way.result()`
        under_way.set_exception(error)
