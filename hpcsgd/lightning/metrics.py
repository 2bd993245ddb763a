"""A callback that logs what the groups' training measures: model distance, other metrics, and bytes sent."""

from __future__ import annotations

from typing import Any, final

import lightning.pytorch as lightning
from lightning.pytorch.callbacks import Callback

from hpcsgd.engine.optimizer import DistributedOptimizer
from hpcsgd.errors import UserError

STRATEGY = "hpcsgd"
"""The name of `HpcsgdStrategy`, by which Lightning knows it."""


@final
class LogMetrics(Callback):
    """A callback that logs the metrics of `HpcsgdStrategy` after each step.

    It logs each of the method's metrics under "hpcsgd/" with its latest value, such as "hpcsgd/distance", the
    model distance of the last synchronization. "hpcsgd/sent_bytes" counts what this rank has sent since the
    training started, without what Lightning sends. With several optimizers, the optimizer's number follows
    the name of a metric. Lightning passes rank 0's values to the loggers every `log_every_n_steps` steps.

    Raises:
        UserError: When the training starts, if the Trainer has another strategy.

    Example:
        >>> import hpcsgd.lightning
        >>> type(hpcsgd.lightning.LogMetrics()).__name__
        'LogMetrics'
    """

    def __init__(self) -> None:
        self._latest: dict[str, float] = {}
        self._before = 0.0

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Begin to count bytes."""
        if getattr(trainer.strategy, "strategy_name", "") != STRATEGY:
            kind = type(trainer.strategy).__name__
            raise UserError(f"LogMetrics: {kind} has no metrics of hpcsgd: train with HpcsgdStrategy")
        self._latest.clear()
        self._before = _sent(trainer.optimizers[0])

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, *args: Any
    ) -> None:
        """Log the latest metrics, and the bytes that this rank has sent."""
        for number, optimizer in enumerate(trainer.optimizers):
            of_several = f"/{number}" if len(trainer.optimizers) > 1 else ""
            for name, value in _metrics(optimizer).items():
                self._latest[f"hpcsgd/{name}{of_several}"] = value
        self._latest["hpcsgd/sent_bytes"] = _sent(trainer.optimizers[0]) - self._before
        for name, value in self._latest.items():
            pl_module.log(name, value)


def _metrics(optimizer: Any) -> dict[str, float]:
    distributed: DistributedOptimizer = optimizer
    return distributed.metrics


def _sent(optimizer: Any) -> float:
    """Return the bytes that this rank has sent since it started."""
    distributed: DistributedOptimizer = optimizer
    return sum(total.bytes for total in distributed.topology.world.stats.totals().values())
