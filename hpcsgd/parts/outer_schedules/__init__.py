"""Outer schedules: the rate and the momentum of an outer optimizer over the run."""

from collections.abc import Callable, Mapping

from hpcsgd.parts.outer_schedules.base import OuterSchedule
from hpcsgd.parts.outer_schedules.muloco import muloco
from hpcsgd.parts.outer_schedules.piecewise import piecewise
from hpcsgd.parts.outer_schedules.pier import pier, pier_cosine

OUTER_SCHEDULES: Mapping[str, Callable[..., OuterSchedule]] = {
    "muloco": muloco,
    "piecewise": piecewise,
    "pier": pier,
    "pier_cosine": pier_cosine,
}
"""The functions that make outer schedules, by their names in job files."""

__all__ = ["OUTER_SCHEDULES", "muloco", "piecewise", "pier", "pier_cosine"]
