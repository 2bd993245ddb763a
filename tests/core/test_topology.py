"""Tests of N ranks as P groups of K, and of actions that succeed on all ranks or raise on all of them."""

from __future__ import annotations

import logging
import re

import pytest

from hpcsgd.comm import Communicator, threads
from hpcsgd.core.topology import form, groups_across_nodes, raise_on_all_ranks, shape
from hpcsgd.errors import JobError, UserError


@pytest.mark.parametrize(
    ("size", "groups", "group_size", "expected"),
    [
        (6, None, None, (1, 6)),
        (6, 2, None, (2, 3)),
        (6, None, 2, (3, 2)),
        (6, 3, 2, (3, 2)),
        (1, 1, 1, (1, 1)),
    ],
)
def test_shapes(size: int, groups: int | None, group_size: int | None, expected: tuple[int, int]) -> None:
    assert shape(size, groups, group_size) == expected


@pytest.mark.parametrize(
    ("groups", "group_size", "message"),
    [
        (4, None, "groups = 4 does not divide the 6 ranks of the job; allowed: 1, 2, 3, 6"),
        (None, 4, "group_size = 4 does not divide the 6 ranks of the job; allowed: 1, 2, 3, 6"),
        (8, None, "groups = 8 is more than the 6 ranks of the job"),
        (0, None, "groups = 0: at least 1 is needed"),
        (2, 2, "groups = 2 of group_size = 2 are 4 ranks, but the job has 6"),
    ],
)
def test_numbers_that_do_not_fit(groups: int | None, group_size: int | None, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        shape(6, groups, group_size)


@pytest.mark.parametrize(("P", "K"), [(1, 4), (2, 2), (4, 1), (2, 4), (1, 1)])
def test_groups_and_positions(run, P: int, K: int) -> None:
    def place(world: Communicator) -> tuple[int, int, list[int], list[int]]:
        topology = form(world, groups=P)
        assert (topology.num_groups, topology.group_size, topology.world_size) == (P, K, P * K)
        return (
            topology.group_index,
            topology.shard_index,
            topology.intra_group.gather_objects(topology.rank),
            topology.inter_group.gather_objects(topology.rank),
        )

    for rank, (g, j, group, cross) in enumerate(run(P * K, place)):
        assert (g, j) == divmod(rank, K)
        assert group == [g * K + i for i in range(K)]
        assert cross == [i * K + j for i in range(P)]


def nodes_of_groups(world: Communicator) -> list[int]:
    topology = form(world, groups=2)
    return topology.intra_group.gather_objects(world.backend.node)


def test_groups_stay_on_a_node_where_they_fit() -> None:
    for nodes in threads.run(4, nodes_of_groups, nodes=[0, 1, 0, 1]):
        assert len(set(nodes)) == 1


def test_groups_across_nodes_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    assert groups_across_nodes([0, 0, 0, 3, 3, 3], 2) == [1]
    with caplog.at_level(logging.WARNING):
        threads.run(6, lambda world: form(world, groups=3), nodes=[0, 0, 0, 3, 3, 3])
        threads.run(6, lambda world: form(world, groups=1), nodes=[0, 0, 0, 3, 3, 3])
    assert [record.getMessage() for record in caplog.records] == [
        "1 of 3 groups span more than one node (2 ranks a group, 2 nodes): their gradients cross the network "
        "at every step",
        "1 of 1 groups span more than one node (6 ranks a group, 2 nodes): their gradients cross the network "
        "at every step",
    ]


@pytest.mark.parametrize("n", [2, 4])
def test_what_fails_on_one_rank_is_reported_by_all(run, n: int) -> None:
    def one_fails(world: Communicator) -> str:
        with pytest.raises(JobError) as error, raise_on_all_ranks(world, "looking"):
            if world.rank == 1:
                raise UserError("nothing here")
        return str(error.value)

    assert run(n, one_fails) == [f"rank 1 of {n}, looking: nothing here"] * n


@pytest.mark.parametrize("n", [1, 2, 4])
def test_what_fails_on_all_ranks_is_reported_once(run, n: int) -> None:
    def all_fail(world: Communicator) -> str:
        with pytest.raises(JobError) as error, raise_on_all_ranks(world, "looking"):
            raise UserError("nothing anywhere")
        return str(error.value)

    assert run(n, all_fail) == ["nothing anywhere"] * n


@pytest.mark.parametrize("n", [1, 2])
def test_what_succeeds_goes_on(run, n: int) -> None:
    def succeed(world: Communicator) -> int:
        with raise_on_all_ranks(world, "looking"):
            found = 3
        return found

    assert run(n, succeed) == [3] * n


@pytest.mark.parametrize("n", [4])
def test_a_job_says_in_one_line_where_this_rank_is(run, n: int) -> None:
    def said(world: Communicator) -> tuple[str, str, str]:
        return repr(form(world, groups=2)), repr(form(world, groups=4)), repr(form(world))

    last = run(n, said)[3]
    assert last == (
        "Topology(2 groups of 2, rank 3: shard 1 of group 1)",
        "Topology(4 groups of 1, rank 3: shard 0 of group 3)",
        "Topology(1 group of 4, rank 3: shard 3 of group 0)",
    )
