"""Schedules that several methods share: when groups meet."""

from hpcsgd.parts.schedules.every import Every, never

__all__ = ["Every", "never"]
