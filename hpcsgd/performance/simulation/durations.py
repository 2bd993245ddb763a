"""Inputs of a simulation: the hosts of the ranks, and the seconds of each part of a step.

The seconds are given by a file or a caller, and do not depend on a machine or model here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpcsgd.errors import UserError


@dataclass(frozen=True)
class Layout:
    """P groups of K ranks on hosts. Rank g·K + j has shard index j in group g; ranks fill hosts in order.

    Raises `UserError` if any number is below 1.
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
        """The number of groups that share a host's link. It is 1, too, if a group spans several hosts."""
        return max(self.ranks_per_host // self.K, 1)


def _require_seconds(**parts: float) -> None:
    for name, seconds in parts.items():
        if not 0 <= seconds < math.inf:
            raise UserError(f"{name} = {seconds}: expected seconds, 0 or more")


@dataclass(frozen=True)
class Message:
    """The seconds of a message to other groups, for methods whose groups send to single other groups.

    A message is all that a group sends in a step. It occupies the link of its host for `link` seconds, first
    come, first served. It arrives `latency` seconds after it has left the link. If the n groups of a host
    send at once, the last message arrives after latency + n·link seconds.
    """

    latency: float = 0.0
    link: float = 0.0

    def __post_init__(self) -> None:
        _require_seconds(latency=self.latency, link=self.link)


@dataclass(frozen=True)
class Durations:
    """Seconds of each part of a step, from the time when all participants have begun it."""

    grad_reduce: float = 0.0
    """Seconds of the gradient reduction in a group."""
    update: float = 0.0
    model_average: float = 0.0
    """Seconds of the average over all groups, in which all ranks communicate at once."""
    gather: float = 0.0
    """Seconds of the allgather of the shards in a group."""
    message: Message = Message()

    def __post_init__(self) -> None:
        _require_seconds(
            grad_reduce=self.grad_reduce,
            update=self.update,
            model_average=self.model_average,
            gather=self.gather,
        )

    @property
    def before_sync(self) -> float:
        """Seconds from the end of a group's backward pass until it averages models or sends them."""
        return self.grad_reduce + self.update
