"""What a simulation is told of a job: who is where, and how long each part of a step takes.

No machine and no model is known here. Seconds come from a file, or from whoever knows the machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpcsgd.errors import UserError


@dataclass(frozen=True)
class Layout:
    """P groups of K ranks, rank g·K + j, laid out host by host.

    Raises `UserError` for less than one of anything.
    """

    P: int
    K: int
    ranks_per_host: int = 1

    def __post_init__(self) -> None:
        for name, value in (
            ("groups", self.P),
            ("group_size", self.K),
            ("ranks_per_host", self.ranks_per_host),
        ):
            if value < 1:
                raise UserError(f"{name} = {value}: expected 1 or more")

    @property
    def N(self) -> int:
        return self.P * self.K

    @property
    def hosts(self) -> int:
        return math.ceil(self.N / self.ranks_per_host)

    @property
    def groups_on_a_host(self) -> int:
        """So many share its link; 1 also where a group is spread over several hosts."""
        return max(self.ranks_per_host // self.K, 1)


def _require_seconds(**parts: float) -> None:
    for name, seconds in parts.items():
        if not 0 <= seconds < math.inf:
            raise UserError(f"{name} = {seconds}: expected seconds, 0 or more")


@dataclass(frozen=True)
class Message:
    """What a group sends in a step where groups send to each other one by one.

    A message leaves over the link of its host, which it keeps busy for `link` seconds, after all that came
    there before it (first come, first served); it is there `latency` seconds after it has left. When the n
    groups of a host send at once, the last message is there after latency + n·link: s·α + w·β of n at once.
    """

    latency: float = 0.0
    link: float = 0.0

    def __post_init__(self) -> None:
        _require_seconds(latency=self.latency, link=self.link)


@dataclass(frozen=True)
class Durations:
    """Seconds of the parts of a step, each when those that take part begin at once."""

    exchange: float = 0.0
    """Of gradients in a group."""
    update: float = 0.0
    model_average: float = 0.0
    """Of all groups, as all ranks share the links then."""
    gather: float = 0.0
    """Of chunks in a group."""
    message: Message = Message()

    def __post_init__(self) -> None:
        _require_seconds(
            exchange=self.exchange, update=self.update, meeting=self.model_average, gather=self.gather
        )

    @property
    def before_sync(self) -> float:
        """From the last gradient of a group to where it meets or sends."""
        return self.exchange + self.update
