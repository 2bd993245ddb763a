"""Where a rank trains, and how samples come there."""

from __future__ import annotations

import torch
from torch import Tensor

from hpcsgd.comm import Communicator
from hpcsgd.comm.streams import StreamEvent, Streams, device_for, on_accelerator, take_over
from hpcsgd.config.schema import Config, TrainingSection
from hpcsgd.errors import in_section
from hpcsgd.start import Formed, form_as_launched


def form_job(world: Communicator, config: Config) -> Formed:
    """The ranks of `world` as `config` has them, and the ways of what will be on devices; collective."""
    return form_as_launched(
        world,
        config.parallel.groups,
        config.parallel.group_size,
        config.parallel.device_backend,
        config.training.device,
    )


def device_of(training: TrainingSection, place: int) -> torch.device:
    """The device that `training` says for the rank of this number on its node.

    Raises `UserError` where there is none.
    """
    with in_section("training"):
        return device_for(training.device, place)


class Delivery:
    """Brings samples to `device` on a stream of its own, while that computes what it was asked before."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = Streams()

    def __call__(self, x: Tensor) -> Tensor:
        """`x`, there. Nobody waits, and `x` may be forgotten: pinned memory is kept until the copy is
        through."""
        if not on_accelerator(self._device):
            return x
        with self._streams.on(self._device):
            there = x.pin_memory().to(self._device, non_blocking=True)
            arrived = StreamEvent(self._device)
        arrived.precede()
        take_over(there)
        return there
