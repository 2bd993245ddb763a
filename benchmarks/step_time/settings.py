"""What is measured: rates × models × kinds of computing."""

from __future__ import annotations

from dataclasses import dataclass

HOSTS, RANKS_PER_HOST = 4, 2
RATES = {"100mbit": 100e6, "1gbit": 1e9}
"""Bits a second."""
COMPUTE = 0.43
"""Seconds of forward and backward pass, where they are emulated."""


@dataclass(frozen=True)
class Setting:
    rate: str
    model: str
    kind: str
    rounds: int
    steps: int
    """Of a block at least; some methods take a multiple of their period."""
    at_once: int = 9
    """Contestants in memory."""
    left_out: tuple[str, ...] = ()
    """Contestants for which there is no time."""
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
