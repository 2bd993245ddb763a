"""Groups that may die: islands, each an MPI job of its own, that meet through a register of members."""

from hpcsgd.islands.meetings import Meetings, Over

__all__ = ["Meetings", "Over"]
