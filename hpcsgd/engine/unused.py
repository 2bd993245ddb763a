"""Gradients that no backward pass of this rank has brought, and which other ranks may have.

Training loops list the gradients that are not None, and then use them, as `clip_grad_norm_` does. Until it is
known what other ranks have, a missing gradient is a pending one of zeros, so that it is listed, too. It does
not count as a gradient of this rank; where no rank has one it is None again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from weakref import WeakMethod

from hpcsgd import torch_private
from hpcsgd.core.slot import Slot


class Unused:
    """The parameters among `slots` that have such a gradient."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self.looks = False
        """Whether it will look at the end of the backward pass that is running."""
        self._arrived: Collection[Slot] = ()
        self.found: set[Slot] = set()

    def __contains__(self, slot: Slot) -> bool:
        return slot in self.found and slot.is_attached()

    def drop(self) -> None:
        """Have none in their place again."""
        for slot in self.found:
            if slot.is_attached():
                slot.hide()
        self.forget()

    def forget(self) -> None:
        """The next pass is the first one of a step; the one before may have ended by an exception."""
        self.found.clear()
        self.looks = False

    def look_after_pass(self, arrived: Collection[Slot]) -> None:
        """Look for missing ones when the backward pass that is running ends; `arrived` grows till then."""
        self.looks, self._arrived = True, arrived
        look = WeakMethod(self._look)
        torch_private.at_end_of_backward(lambda: (found := look()) and found())

    def _look(self) -> None:
        self.looks = False
        if len(self._arrived) == len(self._slots):
            return
        for slot in self._slots:
            if slot.may_pend and slot.gradient is None and slot.param.requires_grad and slot.at_home():
                slot.attach()
                slot.show()
                slot.pend()
                self.found.add(slot)
