"""The measured settings: where ranks run, how long a step takes, and how often something fails."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt


@dataclass(frozen=True)
class Setting:
    """P groups of K ranks, with `per_node` ranks on each node. A step sleeps for `seconds` to compute."""

    P: int = 8
    K: int = 1
    per_node: int = 2
    seconds: float = 0.1
    batch: int = 8
    """Samples per group and step."""
    every: int = 5
    """Steps between synchronizations, for contestants that synchronize models."""
    epoch: int = 20
    """Steps of an epoch while all groups are alive."""
    window: float = 100.0
    """Seconds that are measured, counted from the first step."""
    calm: float = 15.0
    """Seconds of the run without failures."""
    mtbfs: tuple[float, ...] = (10.0, 25.0, 60.0)
    """Mean seconds between failures of the job."""

    @property
    def ranks(self) -> int:
        return self.P * self.K

    @property
    def nodes(self) -> int:
        return self.ranks // self.per_node

    @property
    def samples(self) -> int:
        """Samples of an epoch."""
        return self.P * self.batch * self.epoch

    def steps_between(self, checkpoint: float, mtbf: float) -> int:
        """Return Young's interval √(2·C·M) in steps, for the seconds of a checkpoint, C, and of `mtbf`, M."""
        return max(1, round(sqrt(2 * checkpoint * mtbf) / self.seconds))


FULL = Setting()
QUICK = Setting(P=2, per_node=1, seconds=0.05, window=8.0, calm=3.0, mtbfs=(6.0,))
EACH_KIND = 3
"""The number of kinds of failures. Ranks, groups and nodes fail equally often."""


@dataclass(frozen=True)
class Hazard:
    """The mean times between failures of a job's parts that give that of the whole job."""

    setting: Setting
    mtbf: float

    @property
    def of_a_node(self) -> float:
        """Seconds between failures of one node as a whole."""
        return EACH_KIND * self.mtbf * self.setting.nodes

    @property
    def of_a_rank(self) -> float:
        """Seconds between failures of one rank, by itself or with its group."""
        return EACH_KIND / (EACH_KIND - 1) * self.mtbf * self.setting.ranks
