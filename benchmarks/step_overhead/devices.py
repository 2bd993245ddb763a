"""The device of a rank. This is not in `rank.py`, because importing that starts MPI."""

from __future__ import annotations

import torch


def device_of(kind: str, rank: int) -> torch.device:
    """Return this rank's device among those of its node."""
    if kind == "cpu":
        return torch.device(kind)
    device = torch.device(kind, rank % torch.accelerator.device_count())
    torch.accelerator.set_device_index(device.index)
    return device
