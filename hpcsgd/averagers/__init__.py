"""Averagers that several methods share: how groups meet."""

from hpcsgd.averagers.distance import Measured
from hpcsgd.averagers.ensemble import Ensemble
from hpcsgd.averagers.joined import average_joined
from hpcsgd.averagers.mean import Mean, MeanOfAll, agree
from hpcsgd.averagers.moments import MOMENTS, AroundMoments, Averaged, Reset, kept
from hpcsgd.averagers.packed import PackedMean, mean_by
from hpcsgd.averagers.selection import SELECTIONS, OverPositions, PerRun

__all__ = [
    "MOMENTS",
    "SELECTIONS",
    "AroundMoments",
    "Averaged",
    "Ensemble",
    "Mean",
    "MeanOfAll",
    "Measured",
    "OverPositions",
    "PackedMean",
    "PerRun",
    "Reset",
    "agree",
    "average_joined",
    "kept",
    "mean_by",
]
