"""The settings of `sharded.py`: rates × shapes."""

from __future__ import annotations

from dataclasses import dataclass

RATES = {"100mbit": 100e6, "1gbit": 1e9}
"""Bits per second of a host's link."""
MEMORY = "shared memory"
"""Used in place of a rate if all ranks are on this machine."""
MODEL = "6 M"
COMPUTE = 0.3
"""Seconds of forward and backward pass, in which ranks sleep."""


@dataclass(frozen=True)
class Setting:
    rate: str
    P: int
    K: int
    rounds: int
    steps: int
    """Minimum number of steps of a block; some methods take a multiple of their period."""
    seconds: float = COMPUTE


SETTINGS = [
    Setting(MEMORY, 4, 2, rounds=3, steps=4),
    Setting(MEMORY, 2, 4, rounds=3, steps=4),
    Setting("1gbit", 4, 2, rounds=3, steps=4),
    Setting("1gbit", 2, 4, rounds=3, steps=4),
    Setting("100mbit", 4, 2, rounds=3, steps=2),
    Setting("100mbit", 2, 4, rounds=3, steps=2),
]
QUICK = [Setting("1gbit", 2, 2, rounds=1, steps=1, seconds=0.1)]
