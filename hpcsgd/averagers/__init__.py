"""Averagers that several methods share: how groups meet."""

from hpcsgd.averagers.distance import Measured
from hpcsgd.averagers.mean import Mean, MeanOfAll
from hpcsgd.averagers.moments import Averaged, Reset, kept

__all__ = ["Averaged", "Mean", "MeanOfAll", "Measured", "Reset", "kept"]
