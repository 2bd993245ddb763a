"""Frozen parameters: those that do not require a gradient any more stay as they are, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hpcsgd.core.slot import Slot


class Unmoved:
    """What some parameters are at the beginning of a step, for its end.

    The optimizer skips a parameter without a gradient, but averages and outer steps move the whole model:
    they would move a frozen parameter by what groups had trained apart, or by the momentum of an outer step.
    """

    def __init__(self, slots: Iterable[Slot]) -> None:
        self._before = [(slot, slot.tensor.detach().clone()) for slot in slots]

    def __bool__(self) -> bool:
        return bool(self._before)

    @torch.no_grad()
    def restore(self) -> None:
        """Give them the values that they had."""
        for slot, before in self._before:
            slot.tensor.copy_(before)
