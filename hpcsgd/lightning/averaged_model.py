"""The mean of the groups' models, in place of each group's own, while Lightning evaluates and after `fit`."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from hpcsgd.engine.optimizer import DistributedOptimizer

Optimizers = Sequence[DistributedOptimizer]


@final
class AveragedModel:
    """The averaged model of a LightningModule; each method is collective unless it says otherwise."""

    def __init__(self) -> None:
        self._block: contextlib.ExitStack | None = None
        self._own: list[tuple[Tensor, Tensor]] = []
        """After `keep`: the module's parameters and buffers, and the memory of this group's own values."""

    def show(self, optimizers: Optimizers) -> None:
        """Put the averaged model into the module until `hide`; after `keep` it is there anyway."""
        if self._block is None and not self._own:
            self._block = contextlib.ExitStack()
            for optimizer in optimizers:
                self._block.enter_context(optimizer.averaged_model())

    def hide(self) -> None:
        """Put each group's own model back; not collective."""
        block, self._block = self._block, None
        if block is not None:
            block.close()

    def state_dict(self, module: nn.Module, optimizers: Optimizers) -> dict[str, Any]:
        """Return the averaged model's state."""
        if self._block is not None or self._own:
            return module.state_dict()
        with contextlib.ExitStack() as block:
            for optimizer in optimizers:
                block.enter_context(optimizer.averaged_model())
            return {name: _copy(value) for name, value in module.state_dict().items()}

    def keep(self, module: nn.Module, optimizers: Optimizers) -> None:
        """Put the averaged model into the module for good, in memory that the optimizers do not use."""
        self.show(optimizers)
        averaged = [(x, x.detach().clone()) for x in (*module.parameters(), *module.buffers())]
        self.hide()
        self._own = _exchanged(averaged)

    def forget(self) -> None:
        """Forget each group's own model after `keep`, because another training begins; not collective."""
        self.hide()
        self._own = []

    @contextlib.contextmanager
    def left(self, optimizers: Optimizers) -> Generator[None, None, None]:
        """In the block, the module is this group's own model, even during an evaluation and after `keep`."""
        shown = self._block is not None
        self.hide()
        kept = _exchanged(self._own)
        try:
            yield
        finally:
            _exchanged(kept)
        if shown:
            self.show(optimizers)


def _exchanged(memory: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Give each first tensor the memory of the second one; return the tensors with their own memory."""
    before = [(x, x.data) for x, _ in memory]
    for x, values in memory:
        x.data = values
    return before


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
