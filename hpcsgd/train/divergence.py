"""The error for a loss (or another value of the training) that is not finite."""

from __future__ import annotations

import torch
from torch import Tensor

from hpcsgd.errors import UserError


def require_finite(loss: Tensor, step: int) -> None:
    if not torch.isfinite(loss):
        raise UserError(diverged("loss", loss.item(), step))


def diverged(what: str, value: float, step: int) -> str:
    return f"the {what} is {value} at step {step}: try a lower learning rate or a longer warm-up"
