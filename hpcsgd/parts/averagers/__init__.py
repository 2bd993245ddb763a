"""Averagers that several methods share: how groups meet."""

from hpcsgd.parts.averagers.distance import Measured
from hpcsgd.parts.averagers.ensemble import Ensemble
from hpcsgd.parts.averagers.joined import average_joined
from hpcsgd.parts.averagers.mean import Mean, MeanOfAll, agree
from hpcsgd.parts.averagers.moments import MOMENTS, AroundMoments, AverageState, ResetState, keep_state
from hpcsgd.parts.averagers.packed import PackedMean, mean_by
from hpcsgd.parts.averagers.selection import SELECTIONS, AcrossShards, PerBlock

__all__ = [
    "MOMENTS",
    "SELECTIONS",
    "AcrossShards",
    "AroundMoments",
    "AverageState",
    "Ensemble",
    "Mean",
    "MeanOfAll",
    "Measured",
    "PackedMean",
    "PerBlock",
    "ResetState",
    "agree",
    "average_joined",
    "keep_state",
    "mean_by",
]
