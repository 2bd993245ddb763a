"""The device of a rank, and the copying of samples to the device."""

from __future__ import annotations

import torch
from torch import Tensor

from hpcsgd.comm import Communicator
from hpcsgd.comm.streams import StreamEvent, Streams, device_for, on_accelerator, take_over
from hpcsgd.config.schema import Config, TrainingSection
from hpcsgd.errors import in_section
from hpcsgd.start import Formed, form_as_launched


def form_job(world: Communicator, config: Config) -> Formed:
    """Form the topology of `config` from the ranks of `world`, with device backends; collective."""
    return form_as_launched(
        world,
        config.parallel.groups,
        config.parallel.group_size,
        config.parallel.device_backend,
        config.training.device,
    )


def device_of(training: TrainingSection, place: int) -> torch.device:
    """Return the device that `training` chooses for the rank with index `place` on its node.

    Raises `UserError` if there is no such device.
    """
    with in_section("training"):
        return device_for(training.device, place)


class Delivery:
    """A callable that copies samples to `device` on a stream of its own, while the device computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = Streams()

    def __call__(self, x: Tensor) -> Tensor:
        """Return a copy of `x` on the device, without waiting.

        The caller may drop `x`, because its pinned memory is kept until the copy is done.
        """
        if not on_accelerator(self._device):
            return x
        with self._streams.on(self._device):
            there = x.pin_memory().to(self._device, non_blocking=True)
            arrived = StreamEvent(self._device)
        arrived.precede()
        take_over(there)
        return there
