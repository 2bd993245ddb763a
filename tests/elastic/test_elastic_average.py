"""Groups of threads that average over real connections, and what they do when some are lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from elastic.conftest import HEARTBEAT_TIMEOUT, TOKEN, Desk, wait_for
from hpcsgd.comm import Communicator, threads
from hpcsgd.elastic.client import Client
from hpcsgd.elastic.coordinator import Coordinator
from hpcsgd.elastic.elastic_average import ElasticAverage
from hpcsgd.elastic.endings import Over, Relocated
from hpcsgd.errors import JobError
from in_parallel import at_once

SIZES = (37, 1, 8)
"""The sizes of the vectors; some shards are empty."""


def start_values(replica_group: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(replica_group)
    return [torch.randn(size, generator=generator) for size in SIZES]


def replica_groups(
    at: Coordinator,
    ranks: Sequence[int],
    body: Callable[[int, Communicator, ElasticAverage], Any],
    timeout: float = 60,
) -> list[list[Any]]:
    """Call `body(replica_group, group, elastic_average)` on every rank; return results by group and rank."""

    def of(replica_group: int) -> list[Any]:
        def rank(group: Communicator) -> Any:
            elastic_average = ElasticAverage(
                replica_group,
                group,
                at.address,
                TOKEN,
                "127.0.0.1",
                heartbeat_timeout=HEARTBEAT_TIMEOUT,
                timeout=timeout,
            )
            try:
                return body(replica_group, group, elastic_average)
            finally:
                elastic_average.close()

        return threads.run(ranks[replica_group], rank)

    return at_once(*(partial(of, replica_group) for replica_group in range(len(ranks))))


def test_sixteen_bits_are_summed_in_more(desk: Desk) -> None:
    """The sum of the three groups' values would overflow in 16 bits, and each group would round it."""

    def body(replica_group: int, group: Communicator, elastic_average: ElasticAverage) -> list[Tensor]:
        w = [torch.full((7,), 30000.0 + 16 * replica_group, dtype=torch.float16)]
        elastic_average.mean(w)
        return w

    with desk.coordinator(3) as at:
        for lives in replica_groups(at, (2, 1, 2), body):
            for (w,) in lives:
                assert w.tolist() == [30016.0] * 7


def test_a_group_with_another_number_of_fsdp_ranks_ends_alone(desk: Desk) -> None:
    """Each rank has its own rows, which are others in a group of another size."""

    def body(g: int, group: Communicator, alive: ElasticAverage) -> tuple[int, ...]:
        alive.require_alike([("FSDP", f"over {group.size}")])
        if g == 2:
            wait_for(lambda: at.register.rounds)
            with pytest.raises(JobError, match="FSDP is over 2 on replica groups 0, 1 and over 1 on replica"):
                alive.mean(start_values(g), alike=False)
            return ()
        alive.mean(start_values(g), alike=False)
        wait_for(lambda: 2 in at.membership.expected)
        for _ in range(2):  # the new group is a member after the first one
            alive.mean(start_values(g), alike=False)
        return alive.members

    with desk.coordinator(2) as at:
        assert replica_groups(at, (2, 2, 1), body) == [[(0, 1)] * 2, [(0, 1)] * 2, [()]]


def test_nobody_is_overdue_while_others_train(desk: Desk) -> None:
    """A group without samples waits in its ring from the last round on."""

    def body(g: int, group: Communicator, alive: ElasticAverage) -> bool:
        alive.mean(start_values(g))
        return alive._is_overdue(time.monotonic() - 601)

    with desk.coordinator(1) as at:
        assert replica_groups(at, (1,), body) == [[False]]


def test_no_rank_leaves_before_all_have_reported_the_move(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the end of the first rank would end the others, and the group would be lost."""
    move, course = Client.move, list[str]()

    def slowly(client: Client) -> None:
        if course:
            time.sleep(0.2)
        course.append("about to report")
        move(client)
        course.append("reported")

    def body(replica_group: int, group: Communicator, elastic_average: ElasticAverage) -> None:
        elastic_average.mean(start_values(0))
        elastic_average.move()
        course.append("leaves")
        raise Relocated

    monkeypatch.setattr(Client, "move", slowly)
    with desk.coordinator(1) as at, pytest.raises(Relocated):
        replica_groups(at, (2,), body)
    assert sorted(course[:4]) == ["about to report"] * 2 + ["reported"] * 2
    assert [event for event in desk.events() if event["event"] == "lost"] == []


def mean_of(which: Sequence[int], values: Callable[[int], list[Tensor]] = start_values) -> list[Tensor]:
    return [torch.stack(tensors).mean(0) for tensors in zip(*map(values, which), strict=True)]


def assert_close(w: list[Tensor], expected: list[Tensor]) -> None:
    for x, y in zip(w, expected, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("ranks", [(1,), (1, 1), (2, 2), (2, 1, 3), (1, 1, 1, 1, 1)])
def test_the_mean_of_all(desk: Desk, ranks: tuple[int, ...]) -> None:
    def body(replica_group: int, group: Communicator, elastic_average: ElasticAverage) -> list[Tensor]:
        w = start_values(replica_group)
        for _ in range(3):
            elastic_average.mean(w)
            for x in w:
                x.add_(1)
        assert elastic_average.rounds == 3
        return w

    with desk.coordinator(len(ranks)) as at:
        found = replica_groups(at, ranks, body)
    for of_ranks in found:
        for w in of_ranks:
            assert_close(w, [x + 3 for x in mean_of(range(len(ranks)))])
            assert all(torch.equal(x, y) for x, y in zip(w, found[0][0], strict=True)), (
                "the same bits everywhere"
            )


def test_one_that_dies_between_rounds(desk: Desk) -> None:
    def body(replica_group: int, group: Communicator, elastic_average: ElasticAverage) -> list[Tensor] | None:
        w = start_values(replica_group)
        elastic_average.mean(w)
        if replica_group == 1:
            return None
        w = start_values(replica_group)
        elastic_average.mean(w)
        assert (elastic_average.rounds, elastic_average.members) == (2, (0, 2))
        return w

    with desk.coordinator(3) as at:
        found = replica_groups(at, (2, 2, 1), body)
    for w in (*found[0], *found[2]):
        assert_close(w, mean_of([0, 2]))


def test_one_that_returns_takes_the_mean_and_adds_nothing(desk: Desk) -> None:
    died, seen = threading.Event(), threading.Event()

    def body(replica_group: int, group: Communicator, elastic_average: ElasticAverage) -> list[Tensor]:
        w = start_values(replica_group)
        elastic_average.mean(w)
        if replica_group == 1:
            elastic_average.close()
            died.set()
            seen.wait(20)
            again = ElasticAverage(
                1, group, at.address, TOKEN, "127.0.0.1", heartbeat_timeout=HEARTBEAT_TIMEOUT
            )
            w = [x * 1000 for x in w]
            again.mean(w)
            again.close()
            return w
        died.wait(20)
        w = start_values(replica_group)
        while 1 not in elastic_average.members or not seen.is_set():
            before = [x.clone() for x in w]
            elastic_average.mean(w)
            seen.set()
            wait_for(lambda: elastic_average.rounds > 2 or 1 in at.membership.expected)
        assert_close(w, before)
        return w

    with desk.coordinator(2) as at:
        found = replica_groups(at, (1, 1), body)
    assert_close(found[1][0], found[0][0])
    assert_close(found[0][0], start_values(0))


def test_one_that_comes_after_the_end(desk: Desk) -> None:
    finished = threading.Event()

    def body(replica_group: int, group: Communicator, elastic_average: ElasticAverage) -> None:
        w = start_values(replica_group)
        if replica_group == 0:
            elastic_average.mean(w)
            elastic_average.finish()
            finished.set()
            return
        elastic_average.close()
        finished.wait(20)
        late = ElasticAverage(1, group, at.address, TOKEN, "127.0.0.1", heartbeat_timeout=HEARTBEAT_TIMEOUT)
        with pytest.raises(Over):
            late.mean(w)
        late.close()
        assert_close(w, start_values(1))

    with desk.coordinator(2, timeout=1) as at:
        replica_groups(at, (1, 1), body)
