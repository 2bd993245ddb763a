"""The measured settings: rates × models × kinds of computing."""

from __future__ import annotations

from dataclasses import dataclass

HOSTS, RANKS_PER_HOST = 4, 2
RATES = {"100mbit": 100e6, "1gbit": 1e9}
"""Bits per second of each rate."""
COMPUTE = 0.43
"""Seconds of the forward and backward pass together, if they are emulated."""


@dataclass(frozen=True)
class Setting:
    rate: str
    model: str
    kind: str
    rounds: int
    steps: int
    """Steps of a block. They are rounded up to a multiple of the method's period."""
    at_once: int = 9
    """The number of contestants that are in memory at once."""
    left_out: tuple[str, ...] = ()
    """Contestants that are left out because they would take too long."""
    seconds: float = COMPUTE


SETTINGS = [
    Setting("1gbit", "6 M", "emulated", rounds=5, steps=4),
    Setting("1gbit", "25 M", "emulated", rounds=3, steps=2, at_once=2),
    Setting("1gbit", "6 M", "real", rounds=3, steps=2),
    Setting("100mbit", "6 M", "emulated", rounds=3, steps=1),
    Setting("100mbit", "6 M", "real", rounds=2, steps=1),
    Setting("100mbit", "25 M", "emulated", rounds=1, steps=1, at_once=2,
            left_out=("DDP 1 MB", "DDP 4 MB", "hierarchical(1)", "PowerSGD hook", "model averager(8)",
                      "torchft LocalSGD(8)", "torchft DiLoCo(8)")),
]  # fmt: skip
QUICK = [Setting("1gbit", "6 M", "emulated", rounds=1, steps=1, seconds=0.1)]
