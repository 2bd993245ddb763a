"""Master weights: float32 copies through which 16-bit parameters are updated.

P. Micikevicius et al.: Mixed Precision Training, ICLR 2018, section 3.1: an update of less than half an ulp
of a narrow parameter does not change it, however many such updates follow. In a step, for the elements w that
a rank updates, and their master weights m,

    m ← m + (w − rounded(m))    follow other changes of w: a synchronization, a server, a checkpoint;
                                m ← w where the result does not round to w
    m ← the optimizer's update of m, with the reduced gradient
    w ← rounded(m)

Differences from the paper: a rank has copies of its own shards only, M/K elements; and the first line.
Without that line the next update would undo a synchronization. With m ← w everywhere, each synchronization
would lose the bits that only m has. Those of a much larger m, or of one that is not finite, would change what
w was set to. Gradients and parameters are sent in their narrow dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MASTER = "master"
"""Name of master weights in saved optimizer state: one more state tensor, shaped like the parameter."""


@dataclass(frozen=True, slots=True)
class Master:
    """The master weights m of the elements `w` of one parameter."""

    w: Tensor
    m: Tensor

    @classmethod
    def of(cls, w: Tensor, dtype: torch.dtype) -> Master:
        return cls(w, w.detach().to(dtype.to_complex() if w.is_complex() else dtype))

    def take_gradient(self, g: Tensor | None) -> None:
        self.m.grad = None if g is None else g.to(self.m.dtype)

    @torch.no_grad()
    def follow(self) -> None:
        """Add to m all changes of w since w was set to m; without changes, m stays the same to the bit.

        Where the result does not round to w, m becomes w.
        """
        moved = self.w.to(self.m.dtype).sub_(self.m.to(self.w.dtype)).add_(self.m)
        rounds_to_w = moved.to(self.w.dtype) == self.w
        torch.where(rounds_to_w, moved, self.m.copy_(self.w), out=self.m)

    @torch.no_grad()
    def give(self) -> None:
        """Set w to m, rounded to nearest even, and drop the gradient, which has been used."""
        self.w.copy_(self.m)
        self.m.grad = None


def needs_master(param: Tensor, dtype: torch.dtype) -> bool:
    """Return whether `param` is trained and has fewer bits than the master dtype `dtype`."""
    return param.requires_grad and torch.finfo(param.dtype).bits < torch.finfo(dtype).bits
