"""Which way a message goes: over how many ranks of how many hosts, and who else is on that way."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hpcsgd.cost.collectives import sent

Kind = Literal["inside", "across", "mixed"]


@dataclass(frozen=True)
class LinkClass:
    """A communicator as a machine sees it."""

    ranks: int
    """p, spread evenly over the hosts."""
    hosts: int = 1
    at_once: int = 1
    """So many of its kind has each host a part in, all busy at the same time."""

    @property
    def kind(self) -> Kind:
        """Inside a host, across hosts with a rank on each, or with several on each."""
        if self.hosts == 1:
            return "inside"
        return "across" if self.ranks <= self.hosts else "mixed"

    @property
    def ranks_per_host(self) -> float:
        return self.ranks / self.hosts


def link_classes(P: int, K: int, ranks_per_host: int) -> dict[str, LinkClass]:
    """The group, cross and world communicators of P groups of K, counted host by host."""
    N = P * K
    on_a_host = min(ranks_per_host, N)
    hosts = math.ceil(N / on_a_host)
    groups_on_a_host = max(on_a_host // K, 1)
    return {
        "group": LinkClass(K, math.ceil(K / on_a_host), groups_on_a_host),
        "cross": LinkClass(P, math.ceil(P / groups_on_a_host), min(K, on_a_host)),
        "world": LinkClass(N, hosts),
    }


def load(operation: str, n: float, way: LinkClass) -> float:
    """Bytes that have to pass what this way shares: the link of each host, one direction, or, inside a host,
    its memory. What an allreduce and its like need at least: whatever more an algorithm sends is for a
    measured β to know."""
    if way.ranks == 1:
        return 0.0
    if way.kind == "inside":
        return way.at_once * way.ranks * float(sent(operation, n, way.ranks))
    q, p = way.ranks_per_host, way.ranks
    if operation == "exchange":  # to whomever: all of it may leave
        return way.at_once * q * n
    if operation == "alltoall":  # a part of it for each rank of the other hosts
        return way.at_once * q * (p - q) / p * n
    return way.at_once * float(sent(operation, n, way.hosts))
