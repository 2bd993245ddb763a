"""Parameters of 16 bits, updated by way of float32 copies: master weights.

P. Micikevicius et al.: Mixed Precision Training, ICLR 2018, section 3.1: an update of less than half an ulp
of a narrow parameter leaves it where it is, however many follow. In a step, for the elements that a position
updates,

    m ← m + (w − rounded(m))    whatever else has moved w since: a meeting, a server, a checkpoint
    m ← the optimizer's update of m, by the exchanged gradient
    w ← rounded(m)

Differences from the paper: a position has copies of its own chunk alone, M/K elements, and the first line.
Without it the next update would undo a meeting; with m ← w in its place each meeting would cost the bits that
only m has. Gradients and parameters travel as narrow as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MASTER = "master"
"""As whoever saves the optimizer's state calls it: one more state tensor, of an element for each of w."""


@dataclass(frozen=True, slots=True)
class Master:
    """m of the elements `w` of one parameter."""

    w: Tensor
    m: Tensor

    @classmethod
    def of(cls, w: Tensor, dtype: torch.dtype) -> Master:
        return cls(w, w.detach().to(dtype.to_complex() if w.is_complex() else dtype))

    def take_gradient(self, g: Tensor | None) -> None:
        self.m.grad = None if g is None else g.to(self.m.dtype)

    @torch.no_grad()
    def follow(self) -> None:
        """Move by as much as somebody else has moved w: by nothing, to the bit, where nobody has."""
        self.m.add_(self.w.to(self.m.dtype).sub_(self.m.to(self.w.dtype)))

    @torch.no_grad()
    def give(self) -> None:
        """w ← m, to the nearest even; the gradient has been used."""
        self.w.copy_(self.m)
        self.m.grad = None


def needs_master(param: Tensor, dtype: torch.dtype) -> bool:
    """Whether `param` is trained and has fewer bits than `dtype`, in which updates are to be made."""
    return param.requires_grad and torch.finfo(param.dtype).bits < torch.finfo(dtype).bits
