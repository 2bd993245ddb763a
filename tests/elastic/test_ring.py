"""Sums around a ring of connections between threads."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import Tensor

from elastic.conftest import TOKEN
from hpcsgd.elastic import ring
from hpcsgd.elastic.register import Member, Phase, Register
from hpcsgd.elastic.ring import Broken, TcpRing
from hpcsgd.elastic.rings import Rings
from in_parallel import at_once

PATIENCE = 60.0  # seconds


@contextmanager
def rings(size: int, overdue: Callable[[float], bool] = lambda _: False) -> Iterator[list[TcpRing]]:
    pairs = [socket.socketpair() for _ in range(size)]  # from each one to its right neighbor
    found = [TcpRing(r, size, pairs[r - 1][1], pairs[r][0], overdue) for r in range(size)]
    try:
        yield found
    finally:
        for each in found:
            each.close()


def means(found: list[TcpRing], vectors: list[Tensor | None], n: int, counting: int) -> list[Tensor]:
    def mean(r: int) -> Tensor:
        result = torch.full((n,), torch.nan)
        found[r].mean(vectors[r], result, counting)
        return result

    return at_once(*(partial(mean, r) for r in range(len(found))))


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("n", [1, 4, 7, 1000])
def test_the_mean_is_the_same_everywhere(size: int, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks do not divide the vectors evenly. One participant gives nothing and does not count."""
    monkeypatch.setattr(ring, "_BLOCK", 76)
    vectors: list[Tensor | None] = [torch.arange(float(n)) + 100 * r for r in range(size)]
    vectors[1] = None
    with rings(size) as found:
        results = means(found, vectors, n, size - 1)
    expected = torch.stack([x for x in vectors if x is not None]).mean(0)
    for result in results:
        assert torch.equal(result, results[0])
        assert torch.allclose(result, expected)


def connected(doors: Sequence[ring.Listener], over: Callable[[], bool] = lambda: False) -> list[TcpRing]:
    addresses = [door.address for door in doors]

    def connect(place: int) -> TcpRing:
        return ring.connect(
            doors[place], 3, 1, place, addresses,
            token=TOKEN, heartbeat_timeout=PATIENCE, overdue=lambda _: False, given_up=over,
        )  # fmt: skip

    return at_once(*(partial(connect, place) for place in range(len(doors))))


@pytest.fixture
def doors() -> Iterator[list[ring.Listener]]:
    found = [ring.Listener("127.0.0.1", TOKEN) for _ in range(3)]
    yield found
    for door in found:
        door.close()


def test_they_find_each_other_by_their_doors(doors: list[ring.Listener]) -> None:
    found = connected(doors)
    try:
        results = means(found, [torch.full((5,), 3.0 * r) for r in range(3)], 5, 3)
        assert [x.tolist() for x in results] == [[3.0] * 5] * 3
    finally:
        for each in found:
            each.close()


def test_who_is_cut_looks_up_with_its_neighbour() -> None:
    """This holds however long both may wait. Operations that begin afterwards fail, too."""
    both = [Rings(replica_group, "127.0.0.1", TOKEN, PATIENCE) for replica_group in (4, 7)]
    members = tuple(
        Member(replica_group, (here.address,), 0) for replica_group, here in zip((4, 7), both, strict=True)
    )
    now = Register(1, 0, 0, Phase.RUN, members)
    with ThreadPoolExecutor(2) as pool:
        of = [pool.submit(here.of, 0, now, lambda since: False, lambda: False) for here in both]
        found = [one.result(PATIENCE) for one in of]
        waiting = pool.submit(found[1].mean, torch.ones(3), torch.empty(3), 2)
        both[0].cut()
        with pytest.raises(OSError):
            waiting.result(PATIENCE)
        with pytest.raises(OSError):
            found[0].mean(torch.ones(3), torch.empty(3), 2)
    with pytest.raises(ConnectionError, match="the generation has ended"):
        both[0].of(0, now, lambda since: False, lambda: True)
    for here in both:
        here.close()


def test_nobody_waits_for_a_neighbour_of_a_generation_that_has_ended(doors: list[ring.Listener]) -> None:
    with pytest.raises(ConnectionError, match="the generation has ended"):
        doors[0].wait_for(3, 1, lambda since: False, lambda: True)
    with pytest.raises(Broken, match="the left neighbour did not connect") as raised:
        doors[0].wait_for(3, 1, lambda since: True, lambda: False)
    assert raised.value.side == -1


def test_alone_it_is_its_own() -> None:
    mean = torch.empty(3)
    TcpRing(0, 1).mean(torch.tensor([2.0, 4.0, 6.0]), mean, 2)
    assert mean.tolist() == [1, 2, 3]


def test_it_looks_up_as_soon_as_there_is_something_to_do() -> None:
    """Otherwise the loop would wait a moment each time."""
    left, right = socket.socketpair()
    with left, right:
        right.setblocking(False)
        assert not ring._look(left, None)
        assert ring._look(None, right), "there is room"
        right.sendall(b"something")
        assert ring._look(left, None)
        while ring._send(right, memoryview(bytes(1 << 16))):
            pass
        assert not ring._look(None, right), "there is no more room"


@pytest.mark.parametrize(("late", "side"), [("the left one", -1), ("the right one", 1)])
def test_who_does_nothing_is_named(late: str, side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "_GLANCE", 0.01)
    n = 1 << 20  # elements; more than a connection buffers
    (to_left, left), (right, to_right) = socket.socketpair(), socket.socketpair()
    asked: list[bool] = []
    with to_left, to_right, left, right, ThreadPoolExecutor(1) as pool:
        said = pool.submit(to_left.sendall, bytes(2 * n if late == "the right one" else 0))

        def overdue(since: float) -> bool:
            asked.append(said.done())  # what has come by then is read before the next call
            return asked.count(True) > 1

        with pytest.raises(Broken, match="a neighbour neither sends nor receives") as raised:
            TcpRing(0, 2, left, right, overdue).mean(torch.zeros(n), torch.zeros(n), 2)
    assert raised.value.side == side
