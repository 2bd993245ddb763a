"""Gradients that no backward pass of this rank has computed, though other ranks may have them.

Training loops collect the gradients that are not None and then use them, as `clip_grad_norm_` does. They must
also find a gradient that only other ranks have. Therefore a missing `param.grad` is set to a pending gradient
of zeros, which does not count as a gradient of this rank. If no rank has a gradient, `param.grad` becomes
None again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from weakref import WeakMethod

from hpcsgd import torch_private
from hpcsgd.core.slot import Slot


class Unused:
    """The parameters among `slots` whose missing gradient was set to a pending gradient of zeros."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self.looks = False
        """True if the running backward pass will look for missing gradients at its end."""
        self._arrived: Collection[Slot] = ()
        self.found: set[Slot] = set()

    def __contains__(self, slot: Slot) -> bool:
        return slot in self.found and slot.is_attached()

    def drop(self) -> None:
        """Set these gradients to None again."""
        for slot in self.found:
            if slot.is_attached():
                slot.hide()
        self.forget()

    def forget(self) -> None:
        """Forget the parameters that were found, and a pass that an exception ended before its search."""
        self.found.clear()
        self.looks = False

    def look_after_pass(self, arrived: Collection[Slot]) -> None:
        """Look for missing gradients when the running backward pass ends; `arrived` grows until then."""
        self.looks, self._arrived = True, arrived
        look = WeakMethod(self._look)
        torch_private.at_end_of_backward(lambda: (found := look()) and found())

    def _look(self) -> None:
        self.looks = False
        self.look(self._arrived)

    def look(self, arrived: Collection[Slot]) -> None:
        """Set missing gradients to pending gradients of zeros; do nothing if all gradients have `arrived`."""
        if len(arrived) == len(self._slots):
            return
        for slot in self._slots:
            if slot.may_pend and slot.gradient is None and slot.param.requires_grad and slot.at_home():
                slot.attach()
                slot.show()
                slot.pend()
                self.found.add(slot)
