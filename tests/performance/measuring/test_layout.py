"""The link classes that exist; a class is measured only if it is the same on all communicators."""

from __future__ import annotations

import pytest

from hpcsgd.comm import Communicator, threads
from hpcsgd.cost.link_classes import LinkClass, link_classes
from hpcsgd.performance.measuring.layout import MeasuredLink, courses, link_class_of


def on(hosts: int, ranks_per_host: int) -> list[int]:
    """Return the host of each rank, given by the host's lowest rank."""
    return [rank // ranks_per_host * ranks_per_host for rank in range(hosts * ranks_per_host)]


@pytest.mark.parametrize(("hosts", "ranks_per_host"), [(1, 4), (4, 1), (2, 4), (4, 4), (3, 2)])
def test_all_ways_that_a_plan_could_ask_for(hosts: int, ranks_per_host: int) -> None:
    """They are those that `link_classes` gives for all P × K whose groups fill hosts."""
    N = hosts * ranks_per_host
    found = {course.link_class for course in courses(on(hosts, ranks_per_host))}
    for K in (K for K in range(1, N + 1) if N % K == 0):
        if ranks_per_host % K == 0 or K % ranks_per_host == 0:
            wanted = link_classes(N // K, K, ranks_per_host)
            assert {way for way in wanted.values() if way.ranks > 1} <= found, K


def test_every_way_once_and_a_pair_besides() -> None:
    assert courses(on(1, 4)) == [
        MeasuredLink(LinkClass(4, 1, 1), "inter_group", K=1),
        MeasuredLink(LinkClass(2, 1, 2), "intra_group", K=2),
        MeasuredLink(LinkClass(2, 1, 1), "pair", members=(0, 1)),
    ]
    assert courses(on(1, 2)) == [MeasuredLink(LinkClass(2, 1, 1), "inter_group", K=1)]
    assert courses(on(1, 1)) == []
    pairs = [course for course in courses(on(2, 2)) if course.part == "pair"]
    assert pairs == [
        MeasuredLink(LinkClass(2, 2, 1), "pair", members=(0, 2))
    ]  # inside a host, groups are such pairs


def test_a_pair_only_exchanges() -> None:
    *others, pair = courses(on(1, 4))
    assert pair.operations == ("sendrecv",)
    assert all(set(course.operations) > {"sendrecv", "allreduce", "alltoall"} for course in others)


@pytest.mark.parametrize(
    ("hosts", "way"),
    [
        ([[0, 0], [1, 1]], LinkClass(2, 1, 1)),
        ([[0, 0], [0, 0]], LinkClass(2, 1, 2)),
        ([[0, 1], [0, 1]], LinkClass(2, 2, 2)),
        ([[0, 0, 1, 1]], LinkClass(4, 2, 1)),
        ([[0, 0, 1]], None),  # one host has more of its ranks
        ([[0, 0], [0, 1], [1, 1]], None),  # they differ
        ([[0, 0], [0, 0], [1, 1]], None),  # one host has more of the communicators
    ],
)
def test_the_way_of_communicators(hosts: list[list[int]], way: LinkClass | None) -> None:
    assert link_class_of(hosts) == way


def opened(world: Communicator, nodes: list[int]) -> list[tuple[MeasuredLink, int]]:
    return [(course, course.open(world).size) for course in courses(nodes)]


def test_a_course_opens_what_it_says() -> None:
    nodes = on(2, 2)
    for rank, found in enumerate(threads.run(4, opened, nodes, nodes=nodes)):
        for course, size in found:
            among = course.part != "pair" or rank in course.members
            assert size == course.link_class.ranks or not among
