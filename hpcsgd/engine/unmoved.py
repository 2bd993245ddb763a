"""Copies that keep parameters the same, bit for bit, once they do not require a gradient any more."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hpcsgd.core.slot import Slot


class Unmoved:
    """Copies of some parameters from the beginning of a step, to restore them at its end.

    The optimizer skips a parameter without a gradient, but averages and outer steps change the whole model.
    They would change a frozen parameter by the difference between groups, or by an outer step's momentum.
    """

    def __init__(self, slots: Iterable[Slot]) -> None:
        self._before = [(slot, slot.tensor.detach().clone()) for slot in slots]

    def __bool__(self) -> bool:
        return bool(self._before)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the values of the parameters."""
        for slot, before in self._before:
            slot.tensor.data.copy_(before)  # for autograd this is no write: the values are those of before
