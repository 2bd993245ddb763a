"""The outcome of an attempt to average, for one rank and for a replica group."""

from __future__ import annotations

from enum import IntEnum


class State(IntEnum):
    """The state of a rank in an attempt to average. The state of a group is the maximum over its ranks."""

    FINE = 0
    OUTSIDE = 1
    """The rank is in no running generation, or had an error in it."""
    EVICTED = 2
    """The other groups have continued without this one."""
    OVER = 3
    """The other groups have finished the training."""
