"""The timed operations are those of their names, as the communication statistics and the results show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hpcsgd.comm import Communicator
from hpcsgd.cost.collectives import SHAPES, sent
from hpcsgd.performance.measuring.operations import OPERATIONS, Room, bare, elements_of, on_comm_thread

Run = Callable[..., list[Any]]


def test_there_is_one_for_each_shape() -> None:
    assert set(OPERATIONS) == set(SHAPES)


@pytest.mark.parametrize(("nbytes", "p", "elements"), [(8, 2, 2), (8, 4, 4), (4096, 4, 1024), (100, 3, 27)])
def test_sizes_that_ranks_can_share(nbytes: int, p: int, elements: int) -> None:
    assert elements_of(nbytes, p) == elements


def called(world: Communicator, operation: str) -> tuple[float, list[float], list[float]]:
    """Run an operation on the communication thread, and directly.

    Return the bytes counted, and the sums of the buffers after each of the two.
    """
    after: list[list[float]] = []
    counted = 0.0
    for way in (on_comm_thread, bare):
        room = Room(64)
        room.sent.fill_(world.rank + 1)
        room.received.zero_()
        way(operation, world, 64, room)()
        after.append([float(room.sent.sum()), float(room.received.sum())])
        counted = counted or sum(total.bytes for total in world.stats.totals().values())
    return counted, after[0], after[1]


@pytest.mark.parametrize("operation", sorted(SHAPES))
@pytest.mark.ranks(2)
def test_bytes_are_those_of_the_model_and_bare_does_the_same(run: Run, operation: str) -> None:
    for counted, comm_thread, library in run(2, called, operation):
        assert counted == pytest.approx(float(sent(operation, 256, 2)))
        assert comm_thread == library
