"""In how many bits a model is trained: what the forward pass, the backward pass and the step do about it.

P. Micikevicius et al.: Mixed Precision Training, ICLR 2018. ``bf16`` and ``fp16`` are torch's autocast:
parameters stay as they are, and what gains by it is computed in 16 bits. float16 has few exponents: its
losses are scaled. ``bf16_master`` has bfloat16 parameters, too, and so half the bytes on the wire: see
`master`.
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
    """Of a training on devices of type `device`; without more, that of the parameters."""

    device: str = "cpu"
    computes: torch.dtype | None = None
    """What autocast computes in."""
    scaler: GradScaler | None = None
    master: torch.dtype | None = None
    """What parameters are updated in; the model's are then of the type that it computes in."""

    def computing(self) -> AbstractContextManager[object]:
        """Around the forward pass and the loss, in training and in evaluations."""
        return nullcontext() if self.computes is None else torch.autocast(self.device, self.computes)

    def backward(self, loss: Tensor) -> None:
        """The gradients of `loss`, scaled where that is needed."""
        # torch has no types for it.
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()  # pyright: ignore[reportUnknownMemberType]

    def step(self, optimizer: optim.Optimizer, **arguments: Any) -> bool:
        """That of `optimizer`, with these arguments; whether it was made, and not left out by all ranks since
        gradients of one overflowed. Collective where that is."""
        if self.scaler is None:
            optimizer.step(**arguments)
            return True
        scale = self.scaler.get_scale()
        self.scaler.step(optimizer, **arguments)
        self.scaler.update()
        return self.scaler.get_scale() >= scale

    def state_dict(self) -> dict[str, Any]:
        """The scale and where it has come to, the same on all ranks; nothing where none is needed."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; without a state the scale starts anew."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)


PRECISIONS: Mapping[str, Callable[[str], Precision]] = {
    "fp32": Precision,
    "bf16": lambda kind: Precision(kind, torch.bfloat16),
    "fp16": lambda kind: Precision(kind, torch.float16, scaler=GradScaler(kind)),
    "bf16_master": lambda kind: Precision(kind, torch.bfloat16, master=torch.float32),
}
"""As job files call them, on devices of a type."""


def precision(name: str, device: torch.device) -> Precision:
    """One of `PRECISIONS`. Raises `UserError` where devices of that type do not have it."""
    made = PRECISIONS[name](device.type)
    if made.computes is not None and not torch.amp.is_autocast_available(device.type):
        raise UserError(
            f"precision = {name}: torch has no autocast for {device.type}; allowed: fp32",
            key="precision",
            value=name,
        )
    return made
