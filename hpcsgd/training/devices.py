"""Where a rank trains, and how samples come there."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from hpcsgd.config.schema import Config
from hpcsgd.errors import located
from hpcsgd.transport import Transport
from hpcsgd.transport.launcher import intended_place
from hpcsgd.transport.streams import device_for, on_accelerator


def device_of(config: Config, place: int) -> torch.device:
    """What `config` says, for the rank of this number on its node. Raises `UserError` where there is none."""
    with located("[training]"):
        return device_for(config.training.device, place)


def place_on_node(world: Transport) -> int:
    """This rank's number on its node: the launcher's, or counted where that says none; collective."""
    nodes = world.gather_objects(world.backend.node)
    counted = nodes[: world.rank].count(world.backend.node)
    told = intended_place(os.environ)
    return counted if told is None else told


def to_train_on(x: Tensor, device: torch.device) -> Tensor:
    """`x`, there. Nobody waits, and `x` may be forgotten: pinned memory is kept until the copy is through."""
    return x.pin_memory().to(device, non_blocking=True) if on_accelerator(device) else x
