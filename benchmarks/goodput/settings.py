"""What is measured in small: who is where, how long a step takes, and how often something dies."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt


@dataclass(frozen=True)
class Setting:
    """P groups of K ranks, `per_node` ranks on each node; a step computes for `seconds`, by sleeping."""

    P: int = 8
    K: int = 1
    per_node: int = 2
    seconds: float = 0.1
    batch: int = 8
    """Samples of a group and step."""
    every: int = 5
    """Steps from meeting to meeting, of those that meet."""
    epoch: int = 20
    """Steps, while all groups live."""
    window: float = 100.0
    """Seconds that are measured, from the first step on."""
    calm: float = 15.0
    """Seconds of the run in which nobody is killed."""
    mtbfs: tuple[float, ...] = (10.0, 25.0, 60.0)
    """Seconds between failures of the job, on average."""

    @property
    def ranks(self) -> int:
        return self.P * self.K

    @property
    def nodes(self) -> int:
        return self.ranks // self.per_node

    @property
    def samples(self) -> int:
        """Of an epoch."""
        return self.P * self.batch * self.epoch

    def steps_between(self, checkpoint: float, mtbf: float) -> int:
        """Young's interval, √(2·C·M), in steps."""
        return max(1, round(sqrt(2 * checkpoint * mtbf) / self.seconds))


FULL = Setting()
QUICK = Setting(P=2, per_node=1, seconds=0.05, window=8.0, calm=3.0, mtbfs=(6.0,))
EACH_KIND = 3
"""A rank, a group and a node fail equally often: each of them once in so many failures."""


@dataclass(frozen=True)
class Hazard:
    """What the mean time between failures of a job means for its parts."""

    setting: Setting
    mtbf: float

    @property
    def of_a_node(self) -> float:
        """Seconds between failures of one node as a whole."""
        return EACH_KIND * self.mtbf * self.setting.nodes

    @property
    def of_a_rank(self) -> float:
        """And of one rank by itself or with its group, which is the same for the group."""
        return EACH_KIND / (EACH_KIND - 1) * self.mtbf * self.setting.ranks
