"""Classes of communicators whose operations take the same time.

They differ in ranks, hosts, and the number of communicators that share the links.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hpcsgd.cost.collectives import sent

Kind = Literal["inside", "across", "mixed"]


@dataclass(frozen=True)
class LinkClass:
    """A class of communicators with the same ranks, hosts and load on the links, and so the same speed."""

    ranks: int
    """Number of ranks p, spread evenly over the hosts."""
    hosts: int = 1
    at_once: int = 1
    """The number of communicators of this class on each host. All of them send at the same time."""

    @property
    def kind(self) -> Kind:
        """Where the ranks are: "inside" one host, "across" hosts with one rank on each, or "mixed".

        In the last case there are several hosts with several ranks on each.
        """
        if self.hosts == 1:
            return "inside"
        return "across" if self.ranks <= self.hosts else "mixed"

    @property
    def ranks_per_host(self) -> float:
        return self.ranks / self.hosts


def link_classes(P: int, K: int, ranks_per_host: int) -> dict[str, LinkClass]:
    """Return the classes of the intra-group, inter-group and world communicators.

    P groups of K ranks fill one host after another.
    """
    N = P * K
    on_a_host = min(ranks_per_host, N)
    hosts = math.ceil(N / on_a_host)
    groups_on_a_host = max(on_a_host // K, 1)
    return {
        "intra_group": LinkClass(K, math.ceil(K / on_a_host), groups_on_a_host),
        "inter_group": LinkClass(P, math.ceil(P / groups_on_a_host), min(K, on_a_host)),
        "world": LinkClass(N, hosts),
    }


def load(operation: str, n: float, way: LinkClass) -> float:
    """Return the bytes that `operation` sends over the link or memory that the ranks of a host share.

    `n` is the size of the vector, as in `collectives`. Between hosts the result is the bytes on the link of
    each host in one direction, otherwise those through the host's memory. For an allreduce and similar
    operations it is the least that is possible; the measured β covers what an algorithm sends in addition.
    """
    if way.ranks == 1:
        return 0.0
    if way.kind == "inside":
        return way.at_once * way.ranks * float(sent(operation, n, way.ranks))
    q, p = way.ranks_per_host, way.ranks
    if operation == "sendrecv":  # the receivers are unknown, and all may be on other hosts
        return way.at_once * q * n
    if operation == "alltoall":  # each rank on another host gets a part
        return way.at_once * q * (p - q) / p * n
    return way.at_once * float(sent(operation, n, way.hosts))
