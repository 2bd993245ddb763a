"""Which device a rank has. Not in `rank.py`, whose import starts MPI."""

from __future__ import annotations

import torch


def device_of(kind: str, rank: int) -> torch.device:
    """This rank's, of as many as its node has."""
    if kind == "cpu":
        return torch.device(kind)
    device = torch.device(kind, rank % torch.accelerator.device_count())
    torch.accelerator.set_device_index(device.index)
    return device
