"""Ranks that wait for each other all end soon, with one line; slow ranks do not end the job."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from comm.jobs import KILLED, launch
from hpcsgd.comm import Communicator, Deadlock, PeerLost, RequestServer, doing, phase, rank_watch, threads
from hpcsgd.comm.backend import ANY
from hpcsgd.comm.comm_thread import CommThread
from hpcsgd.comm.deadlock import Need, Report, Table
from hpcsgd.comm.rank_watch import Member, Operation, RankWatch, _State

SAME = "all ranks of a group have to make the same calls in the same order"
LIMIT = 60.0  # seconds; the machine may be busy
SOON = 5.0  # seconds from the fault to the end


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_watch, "PATIENCE", 0.05)
    monkeypatch.setattr(rank_watch, "LOOK", 0.02)


class Heard(Table):
    """A table that signals when ranks have reported that they are blocked."""

    def __init__(self) -> None:
        super().__init__()
        self.blocked: set[int] = set()
        self.changed = threading.Condition()

    def add(self, rank: int, report: Report) -> None:
        super().add(rank, report)
        with self.changed:
            self.blocked.add(rank) if report.blocked else self.blocked.discard(rank)
            self.changed.notify_all()

    def wait_for(self, *ranks: int) -> None:
        """Return once all these ranks are blocked."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.blocked >= set(ranks), LIMIT)


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Heard:
    table = Heard()
    monkeypatch.setattr(threads, "Table", lambda: table)
    return table


def one() -> torch.Tensor:
    return torch.ones(1)


def errors_of(n: int, function: Callable[[Communicator], object]) -> list[BaseException | None]:
    """Return the exception that each rank raises, or None."""
    raised: list[BaseException | None] = [None] * n

    def noted(world: Communicator) -> None:
        try:
            function(world)
        except BaseException as error:
            raised[world.rank] = error
            raise

    with pytest.raises(PeerLost):
        threads.run(n, noted, timeout=LIMIT)
    return raised


def in_two_orders(world: Communicator) -> None:
    first, second = world.split(0, world.rank), world.dup_with_thread()
    if world.rank == 0:
        with doing("clip_grad_norm_() of step 4"):
            first.allreduce(one()).wait()
        second.allreduce(one()).wait()
    else:
        with doing("step 4"), phase("grad_reduce"):
            second.allgather(torch.ones(2), one()).wait()
        first.allreduce(one()).wait()


def test_a_cycle_over_two_communicators() -> None:
    errors = errors_of(2, in_two_orders)
    assert all(isinstance(error, Deadlock) and error.ranks == (0, 1) for error in errors)
    assert {str(error) for error in errors} == {
        "ranks wait for each other: rank 0 is in clip_grad_norm_() of step 4 (allreduce over 2 ranks), "
        f"rank 1 in step 4 (allgather over 2 ranks, grad_reduce): {SAME}"
    }


def test_a_rank_that_leaves_early() -> None:
    def train(world: Communicator) -> None:
        for step in range(8 - world.rank % 2):
            with doing(f"step {step}"):
                world.allreduce(one()).wait()

    errors = errors_of(4, train)
    assert errors[1] is errors[3] is None
    assert isinstance(errors[0], Deadlock)
    assert str(errors[2]) == str(errors[0])
    assert " left after step 6, and rank" in str(errors[0])
    assert (
        "in step 7 (allreduce over 4 ranks): all ranks need the same number of batches, and the same calls"
        in str(errors[0])
    )


def test_messages_in_a_cycle_of_three() -> None:
    def receive_first(world: Communicator) -> None:
        after = (world.rank + 1) % 3
        world.recv(torch.zeros(1), after).wait()
        world.send(one(), (world.rank - 1) % 3).wait()

    errors = errors_of(3, receive_first)
    assert {str(error) for error in errors} == {
        f"ranks wait for each other: ranks 0, 1 and 2 are in recv over 3 ranks: {SAME}"
    }


def test_a_message_from_a_rank_that_has_left() -> None:
    def gossip(world: Communicator) -> None:
        for _ in range(3 - world.rank):
            peer = 1 - world.rank
            world.sendrecv({peer: one()}, {peer: torch.zeros(1)}).wait()

    error = errors_of(2, gossip)[0]
    assert str(error).startswith("rank 1 has left, and rank 0 waits for it in sendrecv over 2 ranks: ")


def test_comm_threads_that_wait_for_comm_threads() -> None:
    def nested(world: Communicator) -> None:
        first, second = world.dup_with_thread(), world.dup_with_thread()
        a, b = (first, second) if world.rank == 0 else (second, first)
        world.run(lambda: (a.allreduce(one()).wait(), b.allreduce(one()).wait()), "both").wait()

    assert all(isinstance(error, Deadlock) for error in errors_of(2, nested))


def test_ranks_that_answer_others() -> None:
    """Servers wait for requests forever; this does not count as waiting."""

    def serve(world: Communicator) -> None:
        RequestServer(world, lambda source, question: [(source, question)], 8)
        in_two_orders(world)

    assert all(isinstance(error, Deadlock) for error in errors_of(2, serve))


def test_a_rank_that_leaves_while_others_might_ask() -> None:
    def serve(world: Communicator) -> None:
        RequestServer(world, lambda source, question: [(source, question)], 8)
        if world.rank == 0:
            with doing("step 7"):
                world.allreduce(one()).wait()

    error = errors_of(2, serve)[0]
    assert str(error).startswith(
        "rank 1 has left, and rank 0 waits for it in step 7 (allreduce over 2 ranks): "
    )


def test_a_rank_that_computes_is_waited_for(heard: Heard) -> None:
    def train(world: Communicator) -> float:
        if world.rank == 1:
            heard.wait_for(0, 2)
        x = one()
        world.allreduce(x).wait()
        return float(x)

    assert threads.run(3, train, timeout=LIMIT) == [3.0] * 3
    assert heard.deadlock is None


def test_a_chain_to_a_rank_that_computes(heard: Heard) -> None:
    def chain(world: Communicator) -> None:
        left, right = world.split(int(world.rank == 2), 0), world.split(int(world.rank == 0), 0)
        if world.rank == 2:
            heard.wait_for(0, 1)
        if world.rank > 0:
            right.allreduce(one()).wait()
        if world.rank < 2:
            left.allreduce(one()).wait()

    threads.run(3, chain, timeout=LIMIT)
    assert heard.deadlock is None


@pytest.mark.parametrize("in_one_call", [False, True])
def test_what_is_queued_on_another_comm_thread_may_free_others(heard: Heard, in_one_call: bool) -> None:
    """Ranks 0 and 1 wait for each other until rank 2 lets the other thread of rank 0 continue."""

    def busy(world: Communicator) -> None:
        with_1, with_2 = world.split(int(world.rank == 2), 0), world.split(int(world.rank == 1), 0)
        control = with_2.with_own_thread()
        also_with_1 = world.split(int(world.rank == 2), 0).with_thread(control.comm_thread)
        if world.rank == 0:
            if in_one_call:
                call = lambda: (control.allreduce(one()).wait(), also_with_1.allreduce(one()).wait())  # noqa: E731
                works = [control.run(call, "both")]
            else:
                works = [control.allreduce(one()), also_with_1.allreduce(one())]
            with_1.allreduce(one()).wait()
            for work in works:
                work.wait()
        elif world.rank == 1:
            also_with_1.allreduce(one()).wait()
            with_1.allreduce(one()).wait()
        else:
            heard.wait_for(0, 1)
            control.allreduce(one()).wait()

    threads.run(3, busy, timeout=LIMIT)
    assert heard.deadlock is None


def test_another_thread_of_a_rank_may_free_others(heard: Heard) -> None:
    def two_threads(world: Communicator) -> None:
        first, second = world.dup_with_thread(), world.dup_with_thread()
        if world.rank == 1:
            second.allreduce(one()).wait()
            first.allreduce(one()).wait()
            return
        begun, go_on = threading.Event(), threading.Event()

        def other() -> None:
            second.run(begun.set, "first use").wait()
            go_on.wait(LIMIT)
            second.allreduce(one()).wait()

        thread = threading.Thread(target=other)
        thread.start()
        assert begun.wait(LIMIT)
        work = first.allreduce(one())
        threading.Thread(target=lambda: (heard.wait_for(1), go_on.set())).start()
        work.wait()
        thread.join()

    threads.run(2, two_threads, timeout=LIMIT)
    assert heard.deadlock is None


def test_a_rank_whose_thread_has_yet_to_notice_is_not_blocked() -> None:
    watch, comm_thread, future = RankWatch(0, Table()), CommThread("lane"), Future[None]()
    watch.adopt(comm_thread.state)
    comm_thread.state.entries.append(None)
    comm_thread.state.executing = Operation("allreduce", lambda: (Need("c", 1, (1,)),))
    watch._waiting[threading.get_ident()] = comm_thread.state, future
    assert watch._state() is not None
    future.set_result(None)
    assert watch._state() is None


def test_a_rank_with_a_comm_thread_that_computes_is_not_blocked() -> None:
    watch, comm_thread, computing = RankWatch(0, Table()), CommThread("lane"), CommThread("another")
    for each in (comm_thread, computing):
        watch.adopt(each.state)
    comm_thread.state.entries.append(None)
    comm_thread.state.executing = Operation("allreduce", lambda: (Need("c", 1, (1,)),))
    watch._waiting[threading.get_ident()] = comm_thread.state, Future[None]()
    assert watch._state() is not None
    computing.state.entries.append(None)
    assert watch._state() is None


def test_a_state_that_changes_between_two_looks_is_not_reported() -> None:
    table, future, looks = Heard(), Future[None](), list[_State]()

    class Changing(RankWatch):
        def _state(self) -> _State:
            looks.append(_State([], [], [(len(looks), None)]))
            if len(looks) == 4:
                future.set_result(None)
            return looks[-1]

    Changing(0, table)._look_until(future, time.monotonic() + LIMIT)
    assert len(looks) == 4
    assert table.blocked == set()


def test_a_comm_thread_that_uses_another_is_no_thread_of_its_own() -> None:
    def nested(world: Communicator) -> None:
        other = world.dup_with_thread()
        assert world.member is not None
        threads_of_rank = world.member.watch._others
        before = set(threads_of_rank)
        world.run(lambda: other.run(lambda: None, "inside").wait(), "outside").wait()
        assert set(threads_of_rank) <= before | {threading.current_thread()}

    threads.run(2, nested, timeout=LIMIT)


class Stub:
    """A backend that only records what its rank waits for during an operation."""

    rank, size, node, name, returns_early = 1, 4, 0, "stub", False

    def __init__(self) -> None:
        self.member = Member(RankWatch(11, Table()), "c", (10, 11, 12, 13))
        self.comm = Communicator(self, timeout=LIMIT, member=self.member)  # pyright: ignore[reportArgumentType]
        self.noted: Sequence[Need] | None = None

    def accepts(self, device: torch.device) -> bool:
        return True

    def __getattr__(self, name: str) -> Callable[..., None]:
        def operation(*args: Any) -> None:
            executing = self.comm.comm_thread.state.executing
            assert executing is not None
            needs = None if executing.needs is None else executing.needs()
            self.noted = needs

        return operation


WAITS_FOR: dict[str, tuple[Callable[[Communicator], Any], list[tuple[str, int, Sequence[int]]]]] = {
    "allreduce": (lambda t: t.allreduce(one()), [("c", 1, range(10, 14))]),
    "nothing is reduced": (lambda t: t.allreduce(torch.zeros(0)), [("c", 1, ())]),
    "bcast from another": (lambda t: t.bcast(one(), 2), [("c", 1, (12,))]),
    "bcast from here": (lambda t: t.bcast(one(), 1), [("c", 1, ())]),
    "allgatherv": (lambda t: t.allgatherv(torch.ones(2), one(), [0, 1, 0, 1]), [("c", 1, range(11, 15, 2))]),
    "recv": (lambda t: t.recv(one(), 0), [("c 10>11", 1, (10,))]),
    "recv from anybody": (lambda t: t.recv(one(), ANY), []),
    "send": (lambda t: t.send(one(), 2), []),
    "sendrecv": (lambda t: t.sendrecv({0: one()}, {3: one(), 2: torch.zeros(0)}), [("c 13>11", 1, (13,))]),
}


@pytest.mark.parametrize("name", WAITS_FOR)
def test_what_an_operation_waits_for(name: str) -> None:
    call, needs = WAITS_FOR[name]
    stub = Stub()
    call(stub.comm).wait()
    assert stub.noted is not None
    assert [(channel, n, tuple(ranks)) for channel, n, ranks in stub.noted] == [
        (channel, n, tuple(ranks)) for channel, n, ranks in needs
    ]
    assert stub.comm.comm_thread.state.executing is None


def test_a_library_that_returns_early_and_servers_take_no_part() -> None:
    stub = Stub()
    stub.member.answers = True
    stub.comm.recv(one(), 0).wait()
    assert stub.noted is None
    stub = Stub()
    stub.returns_early = True
    on_a_device = torch.empty(3, device="meta")
    begun = stub.comm._begun("allreduce", stub.member, (on_a_device,), None, None)
    assert begun.needs is None
    assert stub.comm._begun("allreduce", stub.member, (one(),), None, None).needs is not None


def test_who_does_not_come_in_time_is_reported() -> None:
    started = threading.Barrier(2)

    def frozen(world: Communicator) -> None:
        both = world.dup_with_thread()
        started.wait(LIMIT)
        if world.rank == 0:
            work = both.allreduce(one())
            work._timeout = 0.3
            with pytest.raises(PeerLost, match=r"within 0.3 s; not reported to be in it: rank 1$") as raised:
                work.wait()
            assert raised.value.ranks == (1,)
            assert world.member is not None
            assert world.member.watch.missing(both.comm_thread.state, 0.1) == []  # too short for a report
        started.wait(LIMIT)
        if world.rank == 1:
            both.allreduce(one()).wait()

    threads.run(2, frozen, timeout=LIMIT)


IMPATIENT = "from hpcsgd.comm import rank_watch\nrank_watch.PATIENCE, rank_watch.LOOK = 0.2, 0.05\n"
TOGETHER = "first, second = world.split(0, rank), world.dup_with_thread()\nfault()\n"
JOBS: dict[str, tuple[int, str, str]] = {
    "a cycle over two communicators": (
        2,
        f"{TOGETHER}from hpcsgd.comm import doing\n"
        "with doing('clip_grad_norm_() of step 4' if rank == 0 else 'step 4'):\n"
        "    (first if rank == 0 else second).allreduce(torch.ones(1)).wait()\n"
        "(second if rank == 0 else first).allreduce(torch.ones(1)).wait()\n",
        "hpcsgd: ranks wait for each other: "
        "rank 0 is in clip_grad_norm_() of step 4 (allreduce over 2 ranks), "
        f"rank 1 in step 4 (allreduce over 2 ranks): {SAME}",
    ),
    "three ranks, each in another group": (
        3,
        "groups = {}\n"
        "for color in range(3):\n"
        "    groups[color] = world.split(int(rank == color), rank)\n"
        "fault()\n"
        "groups[(rank + 1) % 3].allreduce(torch.ones(1)).wait()\n"
        "groups[(rank + 2) % 3].allreduce(torch.ones(1)).wait()\n",
        f"hpcsgd: ranks wait for each other: ranks 0, 1 and 2 are in allreduce over 2 ranks: {SAME}",
    ),
    "another call on one communicator": (
        2,
        "from hpcsgd.comm import doing\nfault()\nlong = torch.ones(200000)\n"
        "with doing('clip_grad_norm_() of step 4' if rank == 0 else 'step 4'):\n"
        "    if rank == 0:\n        world.allreduce(long).wait()\n"
        "    else:\n        world.alltoall(torch.ones(200000), long).wait()\n"
        "world.barrier()\n",
        "hpcsgd: ranks make different calls: rank ",
    ),
    "a rank that leaves early": (
        2,
        "from hpcsgd.comm import doing\nfault()\n"
        "for step in range(8 - rank):\n"
        "    with doing(f'step {step}'):\n"
        "        world.allreduce(torch.ones(1)).wait()\n",
        "hpcsgd: rank 1 has left after step 6, and rank 0 waits for it in step 7 (allreduce over 2 ranks): "
        "all ranks need the same number of batches, and the same calls",
    ),
    "rank 0 leaves early, with a service": (
        3,
        "service = RequestServer(world, lambda source, question: [(source, question)], 8)\n"
        "world.barrier()\nfault()\n"
        "if rank > 0:\n    world.allreduce(torch.ones(1)).wait()\n",
        "hpcsgd: rank 0 has left, and rank",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_processes_end_soon_with_one_line(name: str, tmp_path: Path) -> None:
    n, body, line = JOBS[name]
    job = launch(tmp_path, body, n=n)
    assert job.code in {1} | KILLED, job
    assert [told for told in job.stderr.splitlines() if told.startswith("hpcsgd:")] == [
        told for told in job.stderr.splitlines() if told.startswith(line)
    ]
    assert job.stderr.count("hpcsgd:") == 1, job
    assert "Traceback" not in job.stderr, job
    assert job.seconds < SOON + 5, job  # includes the launcher's time


@pytest.mark.slow
def test_processes_that_compute_are_waited_for(tmp_path: Path) -> None:
    """Rank 0 waits for rank 1, and rank 1 for rank 2, ten times longer than `PATIENCE`."""
    job = launch(
        tmp_path,
        "left, right = world.split(int(rank == 2), 0), world.split(int(rank == 0), 0)\nfault()\n"
        "if rank == 2:\n    time.sleep(2)\n"
        "if rank > 0:\n    right.allreduce(torch.ones(1)).wait()\n"
        "if rank < 2:\n    left.allreduce(torch.ones(1)).wait()\n"
        "world.barrier()\n"
        "time.sleep(rank / 2)\n",
        first=IMPATIENT,
        n=3,
    )
    assert (job.code, job.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [0, 2])
def test_processes_tell_who_does_not_come_in_time(frozen: int, tmp_path: Path) -> None:
    job = launch(
        tmp_path,
        f"fault()\nif rank == {frozen}:\n    time.sleep(600)\nwork_until_lost()",
        first=IMPATIENT,
        n=3,
        timeout=4,
    )
    assert job.code in {69} | KILLED, job
    assert f"no answer within 4 s; not reported to be in it: rank {frozen}\n" in job.stderr, job
