"""Tests of messages between two ranks, and of requests answered while their owner computes."""

from __future__ import annotations

import threading

import pytest
import torch

from hpcsgd.comm import ANY, Communicator


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("n", [2, 4, 8])
def test_sendrecv_around_a_ring(run, n: int, dtype: torch.dtype) -> None:
    """All ranks send before they receive: blocking sends of this size would deadlock."""

    def shift(world: Communicator) -> int:
        right, left = (world.rank + 1) % n, (world.rank - 1) % n
        received = torch.zeros(100_000, dtype=dtype)
        world.sendrecv({right: torch.full((100_000,), world.rank, dtype=dtype)}, {left: received}).wait()
        assert (received == left).all()
        return int(received[0])

    assert run(n, shift) == [(rank - 1) % n for rank in range(n)]


@pytest.mark.parametrize("n", [2, 4, 8])
def test_sendrecv_of_different_types_and_partners(run, n: int) -> None:
    """Rank 0 sends to all others, and all of them answer; no other messages are sent."""

    def star(world: Communicator) -> list[float]:
        if world.rank == 0:
            send = {i: torch.tensor([10.0 * i]) for i in range(1, n)}
            recv = {i: torch.zeros(2, dtype=torch.int64) for i in range(1, n)}
        else:
            send = {0: torch.tensor([world.rank, -world.rank])}
            recv = {0: torch.zeros(1)}
        world.sendrecv(send, recv).wait()
        return [float(x) for out in recv.values() for x in out]

    first, *others = run(n, star)
    assert first == [float(x) for i in range(1, n) for x in (i, -i)]
    assert others == [[10.0 * i] for i in range(1, n)]


@pytest.mark.parametrize("n", [2, 4])
def test_messages_of_one_sender_keep_their_order(run, n: int) -> None:
    def talk(world: Communicator) -> tuple[list[int], list[int]] | None:
        if world.rank > 0:
            number = torch.tensor([10 * world.rank])
            for _ in range(3):
                world.send(number, 0).wait()
                number += 1  # the sent tensor may be changed again
            return None
        x, received, senders = torch.zeros(1, dtype=torch.int64), [], []
        for source in range(n - 1, 0, -1):  # differs from the order of arrival
            for _ in range(3):
                senders.append(world.recv(x, source).wait())
                received.append(int(x))
        return received, senders

    ranks = [source for source in range(n - 1, 0, -1) for _ in range(3)]
    assert run(n, talk)[0] == ([10 * rank + i % 3 for i, rank in enumerate(ranks)], ranks)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_requests_are_answered_while_their_owner_is_busy(run, n: int) -> None:
    """Rank 0 waits in a collective that the others join only after their requests have been answered."""

    def parameter_server(world: Communicator) -> tuple[float, list[int]]:
        desk = world.dup_with_thread()
        served: list[int] = []

        def serve() -> None:
            x = torch.zeros(1)
            while len(served) < n - 1:
                client = desk.recv(x, ANY).wait()
                desk.send(x * 2, client).wait()
                served.append(client)

        answer = torch.zeros(1)
        if world.rank == 0:
            server = threading.Thread(target=serve)
            server.start()
            world.barrier()
            server.join()
        else:
            desk.send(torch.tensor([float(world.rank)]), 0).wait()
            desk.recv(answer, 0).wait()
            world.barrier()
        return answer.item(), sorted(served)

    first, *others = run(n, parameter_server)
    assert first == (0.0, list(range(1, n)))
    assert [answer for answer, _ in others] == [2.0 * rank for rank in range(1, n)]
