"""The precision of training, and what the forward pass, the backward pass and the step do for it.

P. Micikevicius et al.: Mixed Precision Training, ICLR 2018. ``bf16`` and ``fp16`` are torch's autocast:
parameters stay as they are, and suitable operations run in 16 bits. float16 has a small range, so losses are
scaled. With ``bf16_master`` the parameters are bfloat16, too, so half the bytes are sent: see `master`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, optim

from hpcsgd.engine.scaling import GradScaler
from hpcsgd.errors import UserError


@dataclass(frozen=True)
class Precision:
    """The precision of training on devices of type `device`; by default that of the parameters."""

    device: str = "cpu"
    computes: torch.dtype | None = None
    """The dtype of autocast. None: no autocast."""
    scaler: GradScaler | None = None
    master: torch.dtype | None = None
    """The dtype of updates; the model's parameters then have the dtype `computes`."""

    def computing(self) -> AbstractContextManager[object]:
        """Return the context for forward pass and loss: torch's autocast, or an empty one."""
        return nullcontext() if self.computes is None else torch.autocast(self.device, self.computes)

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of `loss`, scaled if needed."""
        # torch has no types for `backward`.
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()  # pyright: ignore[reportUnknownMemberType]

    def step(self, optimizer: optim.Optimizer, **arguments: Any) -> bool:
        """Make one step of `optimizer`; collective if its `step` is.

        Return False if all ranks skipped the step because a gradient overflowed on some rank.
        """
        if self.scaler is None:
            optimizer.step(**arguments)
            return True
        scale = self.scaler.get_scale()
        self.scaler.step(optimizer, **arguments)
        self.scaler.update()
        return self.scaler.get_scale() >= scale

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale and its progress, the same on all ranks; empty without a scaler."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`; if it is empty, the scale starts anew."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)


PRECISIONS: Mapping[str, Callable[[str], Precision]] = {
    "fp32": Precision,
    "bf16": lambda kind: Precision(kind, torch.bfloat16),
    "fp16": lambda kind: Precision(kind, torch.float16, scaler=GradScaler(kind)),
    "bf16_master": lambda kind: Precision(kind, torch.bfloat16, master=torch.float32),
}
"""Functions by their names in job files; each returns a `Precision` for a device type."""


def precision(name: str, device: torch.device) -> Precision:
    """Return the precision `name` for `device`, or raise `UserError` if such devices do not support it."""
    made = PRECISIONS[name](device.type)
    if made.computes is not None and not torch.amp.is_autocast_available(device.type):
        raise UserError(
            f"precision = {name}: torch has no autocast for {device.type}; allowed: fp32",
            key="precision",
            value=name,
        )
    return made
