"""Schedules that several methods share: after which steps the groups synchronize."""

from hpcsgd.parts.schedules.by_speed import LOCAL_STEPS, BySpeed, DynamicLocalSteps
from hpcsgd.parts.schedules.every import Every, never

__all__ = ["LOCAL_STEPS", "BySpeed", "DynamicLocalSteps", "Every", "never"]
