"""Averagers that several methods share: how groups meet."""

from hpcsgd.parts.averagers.distance import Measured
from hpcsgd.parts.averagers.ensemble import Ensemble
from hpcsgd.parts.averagers.joined import average_joined
from hpcsgd.parts.averagers.mean import Mean, MeanOfAll, agree
from hpcsgd.parts.averagers.moments import MOMENTS, AroundMoments, Averaged, Reset, kept
from hpcsgd.parts.averagers.packed import PackedMean, mean_by
from hpcsgd.parts.averagers.selection import SELECTIONS, OverPositions, PerRun

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
