"""Averagers that several methods share: what happens at a synchronization."""

from hpcsgd.parts.averagers.distance import WithDistance
from hpcsgd.parts.averagers.elastic_mean import ElasticMean
from hpcsgd.parts.averagers.flattened import average_flattened
from hpcsgd.parts.averagers.guarded import Guarded, guarded
from hpcsgd.parts.averagers.guarded_elastic_mean import GuardedElasticMean
from hpcsgd.parts.averagers.mean import Mean, MeanOfAll, set_to_average
from hpcsgd.parts.averagers.optimizer_state import (
    OPTIMIZER_STATE,
    AverageState,
    ResetState,
    WithOptimizerState,
    keep_state,
)
from hpcsgd.parts.averagers.outer_elastic_fragments import OuterElasticFragments
from hpcsgd.parts.averagers.outer_elastic_mean import MeanFrom, OuterElasticMean
from hpcsgd.parts.averagers.outer_step import NESTEROV, OUTER_STATE, MakeOptimizer, OuterStep
from hpcsgd.parts.averagers.pseudo_gradient_penalty import GUARDS, PseudoGradientPenalty
from hpcsgd.parts.averagers.quantized_mean import QuantizedMean, mean_by
from hpcsgd.parts.averagers.radial_directional import (
    MERGES,
    RadialDirectional,
    RadialDirectionalMean,
    require_alone,
)
from hpcsgd.parts.averagers.radial_directional_elastic import RadialDirectionalElasticMean
from hpcsgd.parts.averagers.selection import SELECTIONS, AcrossShards, PerBlock
from hpcsgd.parts.averagers.sparse_message import CLIPS, MESSAGE_MEANS, MedianNorm, OverGroups, OverSenders

__all__ = [
    "CLIPS",
    "GUARDS",
    "MERGES",
    "MESSAGE_MEANS",
    "NESTEROV",
    "OPTIMIZER_STATE",
    "OUTER_STATE",
    "SELECTIONS",
    "AcrossShards",
    "AverageState",
    "ElasticMean",
    "Guarded",
    "GuardedElasticMean",
    "MakeOptimizer",
    "Mean",
    "MeanFrom",
    "MeanOfAll",
    "MedianNorm",
    "OuterElasticFragments",
    "OuterElasticMean",
    "OuterStep",
    "OverGroups",
    "OverSenders",
    "PerBlock",
    "PseudoGradientPenalty",
    "QuantizedMean",
    "RadialDirectional",
    "RadialDirectionalElasticMean",
    "RadialDirectionalMean",
    "ResetState",
    "WithDistance",
    "WithOptimizerState",
    "average_flattened",
    "guarded",
    "keep_state",
    "mean_by",
    "require_alone",
    "set_to_average",
]
