"""List the classes of communicators (`LinkClass`) that a job on these hosts could have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from hpcsgd.comm import Communicator
from hpcsgd.core.topology import form
from hpcsgd.cost.collectives import SHAPES
from hpcsgd.cost.link_classes import LinkClass

Part = Literal["intra_group", "inter_group", "pair"]
PAIR = ("sendrecv",)
"""The operations that are measured on a single pair of ranks, while no other rank sends."""


@dataclass(frozen=True)
class MeasuredLink:
    """A class of communicators to measure, and the groups or pair of ranks that form one of this class."""

    link_class: LinkClass
    part: Part
    K: int = 0
    """The size of the groups; 0 for a pair."""
    members: tuple[int, int] = (0, 0)
    """The two ranks, if a pair is measured."""

    @property
    def operations(self) -> tuple[str, ...]:
        return PAIR if self.part == "pair" else tuple(SHAPES)

    def open(self, world: Communicator) -> Communicator:
        """Return this rank's communicator of the class. Collective; ranks outside a pair form their own."""
        if self.part == "pair":
            return world.split(int(world.rank in self.members), world.rank)
        topology = form(world, group_size=self.K)
        return topology.intra_group if self.part == "intra_group" else topology.inter_group


def courses(nodes: Sequence[int]) -> list[MeasuredLink]:
    """Return a link to measure for each class of communicator that P groups of K ranks have, for any K.

    `nodes[r]` is the node of rank r, in ascending order. Groups and inter-group communicators that are spread
    unevenly over hosts are left out.
    """
    N = len(nodes)
    found: dict[LinkClass, MeasuredLink] = {}
    for K in (K for K in range(1, N + 1) if N % K == 0):
        groups = [range(g * K, (g + 1) * K) for g in range(N // K)]
        positions = [range(j, N, K) for j in range(K)]
        parts: list[tuple[Part, Sequence[range]]] = [("intra_group", groups), ("inter_group", positions)]
        for part, communicators in parts:
            way = link_class_of([[nodes[rank] for rank in each] for each in communicators])
            if way is not None and way.ranks > 1:
                found.setdefault(way, MeasuredLink(way, part, K))
    for pair in _pairs(nodes):
        found.setdefault(pair.link_class, pair)
    return list(found.values())


def link_class_of(hosts: Sequence[Sequence[int]]) -> LinkClass | None:
    """Return the class of communicators that are used at once, or None if their classes differ.

    `hosts` has one list per communicator: the hosts of its ranks.
    """
    spread = [Counter(each) for each in hosts]
    if len({len(each) for each in spread}) > 1 or any(len(set(each.values())) > 1 for each in spread):
        return None
    busy = Counter(host for each in spread for host in each)
    if len(set(busy.values())) > 1:
        return None
    return LinkClass(len(hosts[0]), len(spread[0]), max(busy.values()))


def _pairs(nodes: Sequence[int]) -> Iterator[MeasuredLink]:
    """Yield a pair of ranks inside one host and a pair on two hosts, as far as such pairs exist."""
    first, second = nodes[0], next((node for node in nodes if node != nodes[0]), None)
    if nodes.count(first) > 1:
        yield MeasuredLink(LinkClass(2, 1), "pair", members=(0, 1))
    if second is not None:
        yield MeasuredLink(LinkClass(2, 2), "pair", members=(0, nodes.index(second)))
