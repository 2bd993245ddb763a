"""Lightning: `HpcsgdStrategy` trains an unchanged LightningModule in groups, and `LogMetrics` logs metrics.

Import this package before `Trainer(strategy="hpcsgd")`: the import registers that name.
"""

from __future__ import annotations

from hpcsgd.errors import UserError

try:
    from lightning.pytorch.strategies import StrategyRegistry
except ImportError as error:
    raise UserError('hpcsgd.lightning needs Lightning: pip install "hpcsgd[lightning]"') from error

from hpcsgd.lightning.metrics import STRATEGY
from hpcsgd.lightning.metrics import LogMetrics as LogMetrics
from hpcsgd.lightning.strategy import HpcsgdStrategy as HpcsgdStrategy

__all__ = ["HpcsgdStrategy", "LogMetrics"]

StrategyRegistry.register(
    STRATEGY, HpcsgdStrategy, description="hpcsgd with all its defaults: one group, synchronous SGD"
)
