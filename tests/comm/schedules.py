"""Random programs of ranks, executed one action after another, which define a deadlock without threads.

The state of each rank is in a real `RankWatch`, whose communication threads are simulated. How far the ranks
get does not depend on the order of actions: no rank chooses between two messages from others.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hpcsgd.comm.deadlock import Report, Table
from hpcsgd.comm.rank_watch import Member, RankWatch, ThreadState


class Op(NamedTuple):
    """A collective on communicator `comm`, or messages from each of its members to the next one."""

    comm: int
    collective: bool = True


@dataclass(eq=False)
class Call:
    """A call that a communication thread executes."""

    ops: list[Op]
    at: int = 0
    future: Future[None] = field(default_factory=Future)
    inner: Call | None = None
    """The call that this one has submitted to another communication thread."""


@dataclass(eq=False)
class FakeCommThread:
    """A simulated communication thread: the state that a `RankWatch` reads, and the calls in order."""

    ident: int
    calls: deque[Call] = field(default_factory=deque)
    met: Callable[[], bool] = bool

    def __post_init__(self) -> None:
        self.state = ThreadState()
        self.state.ident = self.ident

    def submit(self, call: Call) -> None:
        self.calls.append(call)
        self.state.entries.append(None)


WAIT = "wait"
Program = list[Op | list[Op] | str]
"""Items start an operation or a call of several operations, or wait for the oldest pending call."""


class Kept:
    """Reports that have been sent but are not yet in the table."""

    def __init__(self) -> None:
        self.reports: deque[Report] = deque()

    def add(self, rank: int, report: Report) -> None:
        self.reports.append(report)

    def check(self) -> None: ...

    def missing(self, needs: object) -> list[int]:
        return []


class Rank:
    """A rank that executes a program."""

    def __init__(
        self, rank: int, program: Program, comms: list[list[int]], thread_of: list[int], begun: Counter[Any]
    ) -> None:
        self.rank, self.program, self.comms, self.begun = rank, program, comms, begun
        self.kept = Kept()
        self.watch = RankWatch(rank, self.kept)
        self.comm_threads = [FakeCommThread(-1 - i) for i in range(max(thread_of) + 1)]
        for comm_thread in self.comm_threads:
            self.watch.adopt(comm_thread.state)
        self.thread_of = [self.comm_threads[i] for i in thread_of]
        self.members = [Member(self.watch, str(c), ranks) for c, ranks in enumerate(comms)]
        self.at = 0
        self.under_way: deque[tuple[FakeCommThread, Call]] = deque()
        self.has_left = False

    def actions(self) -> Iterator[Callable[[], None]]:
        """Yield the actions that this rank can take now."""
        if not self.has_left and (self.at == len(self.program) or self.program[self.at] != WAIT):
            yield self.go_on
        elif not self.has_left and self.under_way[0][1].future.done():
            yield self.end_wait
        elif not self.has_left and not self.watch._waiting.get(self.watch._owner):
            yield self.begin_wait
        for comm_thread in self.comm_threads:
            if comm_thread.calls and (action := self.next_action(comm_thread, comm_thread.calls[0])):
                yield action

    def go_on(self) -> None:
        if self.at == len(self.program):
            self.has_left = True
            self.watch.leaving = True
            self.watch.left()
            return
        item = self.program[self.at]
        assert not isinstance(item, str)
        ops = [item] if isinstance(item, Op) else item
        comm_thread, call = self.thread_of[ops[0].comm], Call(list(ops))
        comm_thread.submit(call)
        self.under_way.append((comm_thread, call))
        self.at += 1

    def begin_wait(self) -> None:
        comm_thread, call = self.under_way[0]
        self.watch._waiting[self.watch._owner] = comm_thread.state, call.future

    def end_wait(self) -> None:
        self.watch._waiting.pop(self.watch._owner, None)
        self.under_way.popleft()
        self.at += 1

    def next_action(self, comm_thread: FakeCommThread, call: Call) -> Callable[[], None] | None:
        if comm_thread.state.executing is not None:
            return (lambda: self.end(comm_thread, call)) if comm_thread.met() else None
        if call.at == len(call.ops):
            return lambda: self.end_call(comm_thread, call)
        if call.inner is not None:
            return (lambda: self.end_inner(comm_thread, call)) if call.inner.future.done() else None
        other = self.thread_of[call.ops[call.at].comm]
        if other is not comm_thread:
            return lambda: self.begin_inner(comm_thread, other, call)
        return lambda: self.begin(comm_thread, call)

    def begin(self, comm_thread: FakeCommThread, call: Call) -> None:
        comm_thread.state.single = len(call.ops) == 1
        op = call.ops[call.at]
        ranks, begun = self.comms[op.comm], self.begun
        if op.collective:
            comm_thread.state.executing = self.members[op.comm].collective("collective")
            begun[op.comm, self.rank] += 1
            count = begun[op.comm, self.rank]
            comm_thread.met = lambda: all(begun[op.comm, r] >= count for r in ranks)
            return
        me = ranks.index(self.rank)
        after, before = (me + 1) % len(ranks), (me - 1) % len(ranks)
        comm_thread.state.executing = self.members[op.comm].messages("sendrecv", [after], {before: True})
        begun[op.comm, self.rank, ranks[after]] += 1
        begun[op.comm, "received", self.rank] += 1
        wanted = begun[op.comm, "received", self.rank]
        comm_thread.met = lambda: begun[op.comm, ranks[before], self.rank] >= wanted

    def end(self, comm_thread: FakeCommThread, call: Call) -> None:
        comm_thread.state.executing = None
        call.at += 1

    def end_call(self, comm_thread: FakeCommThread, call: Call) -> None:
        call.future.set_result(None)
        comm_thread.calls.popleft()
        comm_thread.state.entries.popleft()

    def begin_inner(self, comm_thread: FakeCommThread, other: FakeCommThread, call: Call) -> None:
        call.inner = Call([call.ops[call.at]])
        other.submit(call.inner)
        self.watch._waiting[comm_thread.ident] = other.state, call.inner.future

    def end_inner(self, comm_thread: FakeCommThread, call: Call) -> None:
        del self.watch._waiting[comm_thread.ident]
        call.inner = None
        call.at += 1

    def look(self) -> None:
        """Send a report, as a waiting thread does."""
        if self.watch._owner in self.watch._waiting:
            state = self.watch._state()
            self.kept.add(self.rank, Report(False) if state is None else self.watch._blocked(state))


def written(dice: random.Random) -> tuple[list[Program], list[list[int]], list[int]]:
    """Return a program of each rank, the members of each communicator, and its communication thread.

    All ranks make their parts of the same calls, except those that swap two or leave some out. A
    communication thread waits only for those with higher numbers.
    """
    n = dice.randint(2, 4)
    comms = [sorted(dice.sample(range(n), dice.randint(2, n))) for _ in range(dice.randint(2, 5))]
    thread_of = [dice.randrange(dice.randint(2, 4)) for _ in comms]
    programs: list[Program] = [[] for _ in range(n)]
    for _ in range(dice.randint(1, 10)):
        ops = [
            Op(dice.randrange(len(comms)), dice.random() < 0.7) for _ in range(dice.choice((1, 1, 1, 2, 3)))
        ]
        ops.sort(key=lambda op: thread_of[op.comm])
        for rank, program in enumerate(programs):
            if mine := [op for op in ops if rank in comms[op.comm]]:
                program.append(mine[0] if len(mine) == 1 else mine)
                program.extend([WAIT] * (dice.random() < 0.4))
    for program in programs:
        if len(program) > 1 and dice.random() < 0.25:
            i, j = dice.randrange(len(program)), dice.randrange(len(program))
            program[i], program[j] = program[j], program[i]
        if program and dice.random() < 0.15:
            del program[dice.randrange(len(program)) :]
        _complete_waits(program)
    return programs, comms, thread_of


def _complete_waits(program: Program) -> None:
    """Remove waits where nothing is pending, and add waits at the end for everything that is."""
    items, under_way = list(program), 0
    program.clear()
    for item in items:
        if item != WAIT or under_way:
            program.append(item)
            under_way += -1 if item == WAIT else 1
    program += [WAIT] * under_way


def executed(dice: random.Random) -> tuple[set[int], Table]:
    """Execute random programs in a random order, with one slow rank and with reports that arrive late.

    Returns:
        The ranks that never finish, and the table of reports with the deadlock found.
    """
    programs, comms, thread_of = written(dice)
    begun: Counter[Any] = Counter()
    ranks = [Rank(rank, program, comms, thread_of, begun) for rank, program in enumerate(programs)]
    table = Table()
    slow = dice.choice(ranks)
    while actions := [(rank, action) for rank in ranks for action in rank.actions()]:
        others = [action for rank, action in actions if rank is not slow]
        dice.choice(others or [action for _, action in actions])()
        all_wait = not others and dice.random() < 0.5
        for rank in ranks:
            if all_wait or dice.random() < 0.3:
                rank.look()
            while rank.kept.reports and (all_wait or dice.random() < 0.3):
                table.add(rank.rank, rank.kept.reports.popleft())
    for rank in ranks:
        rank.look()
        while rank.kept.reports:
            table.add(rank.rank, rank.kept.reports.popleft())
    return {rank.rank for rank in ranks if not rank.has_left}, table
