"""Averagers that several methods share: what happens at a synchronization."""

from hpcsgd.parts.averagers.distance import WithDistance
from hpcsgd.parts.averagers.elastic_mean import ElasticMean
from hpcsgd.parts.averagers.flattened import average_flattened
from hpcsgd.parts.averagers.mean import Mean, MeanOfAll, set_to_average
from hpcsgd.parts.averagers.optimizer_state import (
    OPTIMIZER_STATE,
    AverageState,
    ResetState,
    WithOptimizerState,
    keep_state,
)
from hpcsgd.parts.averagers.quantized_mean import QuantizedMean, mean_by
from hpcsgd.parts.averagers.selection import SELECTIONS, AcrossShards, PerBlock

__all__ = [
    "OPTIMIZER_STATE",
    "SELECTIONS",
    "AcrossShards",
    "AverageState",
    "ElasticMean",
    "Mean",
    "MeanOfAll",
    "PerBlock",
    "QuantizedMean",
    "ResetState",
    "WithDistance",
    "WithOptimizerState",
    "average_flattened",
    "keep_state",
    "mean_by",
    "set_to_average",
]
