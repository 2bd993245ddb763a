"""The process group in NCCL's place works in the order of the streams, and the host does not wait."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from far.ranks import PATTERNS, explicitly
from far.stream_ordered import StreamOrdered
from hpcsgd.comm import Communicator, threads

PATIENCE = 60.0  # seconds; the machine may be busy
N = 2

pytestmark = pytest.mark.usefixtures("far_device")


def every_operation(world: Communicator, store: Any, device: torch.device) -> tuple[list[Tensor], list[str]]:
    """Return the results of every operation, and the reasons for which the host waited."""
    group = StreamOrdered(store, world.rank, N, timedelta(seconds=PATIENCE))
    world.barrier()
    torch.ops.far.forget_waits()
    world.barrier()
    x = torch.arange(4, dtype=torch.float32, device=device).add_(10 * world.rank)
    swapped, scattered, gathered = torch.empty_like(x), x.new_empty(2), x.new_empty(8)
    group.alltoall_base(swapped, x, [], [])
    group._reduce_scatter_base(scattered, x)
    group._allgather_base(gathered, x)
    largest, told, received = x.clone(), x.clone(), torch.empty_like(x)
    options: Any = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    group.allreduce([largest], options)
    root = dist.BroadcastOptions()
    root.rootRank = 1
    group.broadcast([told], root)
    group._start_coalescing()
    group.recv([received], 1 - world.rank, 0)
    group.send([x], 1 - world.rank, 0)
    group._end_coalescing()
    waited = torch.ops.far.waits(device.index)
    results = [y.cpu() for y in (swapped, scattered, gathered, largest, told, received)]
    world.barrier()
    group.abort()
    return results, waited


@pytest.mark.parametrize("pattern", PATTERNS)
def test_ranks_communicate_when_their_streams_come_there(pattern: str) -> None:
    store = torch.distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    ranks = threads.run(N, explicitly(every_operation, PATTERNS[pattern]), store, timeout=PATIENCE)
    xs = [[0, 1, 2, 3], [10, 11, 12, 13]]
    for rank, (results, waited) in enumerate(ranks):
        swapped, scattered, gathered, largest, told, received = (y.tolist() for y in results)
        mine = slice(2 * rank, 2 * rank + 2)
        assert swapped == xs[0][mine] + xs[1][mine]
        assert scattered == [a + b for a, b in zip(xs[0][mine], xs[1][mine], strict=True)]
        assert gathered == xs[0] + xs[1]
        assert largest == told == xs[1]
        assert received == xs[1 - rank]
        assert waited == []
