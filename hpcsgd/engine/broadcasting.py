"""Broadcast of buffers within a group: after each step all ranks have those of the group's first rank.

torch's DistributedDataParallel does the same before each forward pass (`broadcast_buffers`). Codebooks,
queues and their pointers need the broadcast if all ranks are to continue from one state. So do running
statistics that must be the same on all ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hpcsgd.comm import Communicator, phase
from hpcsgd.core.buffers import is_dense, make_writable, share
from hpcsgd.parts.averagers.flattened import require_same_layout


def broadcast_buffers(model: nn.Module, group: Communicator) -> None:
    """Set the buffers of `model` on all ranks of `group` to those of its first rank; collective.

    Raises:
        UserError: If the ranks' buffers differ in number, shape or dtype.
    """
    if group.size == 1:
        return
    with phase("buffers"):
        make_writable(model)
        buffers = list(model.buffers())
        require_same_layout({"buffers": buffers}, group, "models", "rank")
        for device in dict.fromkeys(x.device for x in buffers):
            _broadcast([x for x in buffers if x.device == device and is_dense(x)], group)
        for x in buffers:
            if not is_dense(x):
                share(x, group)


def _broadcast(buffers: list[Tensor], group: Communicator) -> None:
    """Broadcast `buffers`, all on one device, in one message."""
    if not buffers:
        return
    bits = torch.cat([x.detach().contiguous().view(-1).view(torch.uint8) for x in buffers])
    group.bcast(bits).wait()
    if group.rank == 0:
        return
    for x, theirs in zip(buffers, torch.split(bits, [x.nbytes for x in buffers]), strict=True):
        x.copy_(theirs.clone().view(x.dtype).view(x.shape))  # a copy is aligned in memory, a part is not
