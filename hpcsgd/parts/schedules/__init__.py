"""Schedules that several methods share: after which steps the groups synchronize."""

from hpcsgd.parts.schedules.every import Every, never

__all__ = ["Every", "never"]
