"""Threads of which only one runs at a time, in an order that a seed decides.

With the same seed, events happen in the same order. The objects of a `Stage` replace threads, locks and
clocks in the modules of hpcsgd that its actors use (`staged`).

Another actor may continue whenever an actor waits, acquires a lock or has sent something. The same may happen
before tensors are read or written (`Preempting`). Simulated time advances only when all actors wait, so that
timeouts do not depend on the machine's speed. If no actor can continue, all actors raise `Stuck`.
"""

from __future__ import annotations

import random
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch.overrides import TorchFunctionMode

Ready = Callable[[], bool]
_here = threading.local()  # .actor: the actor whose thread this is
FOR_EVER = float("inf")
READING = ("cat", "clone", "item", "stack", "to")
"""Functions of torch that read elements. The names of those that write elements end in an underscore."""


class Stuck(BaseException):
    """All actors wait for each other, or the simulation does not end."""


class Actor:
    """A thread of the stage, with the interface of `threading.Thread`."""

    def __init__(
        self,
        stage: Stage,
        target: Callable[..., object],
        args: Sequence[Any] = (),
        name: str | None = None,
        daemon: bool | None = None,
    ) -> None:
        self.stage, self.name = stage, name or "thread"
        self.daemon = daemon
        self.troupe: object = None
        """The key of actors that are killed or frozen together; by default that of the starting actor."""
        self.ready: Ready = lambda: True
        self.until = FOR_EVER
        self.priority = stage.chance.random()
        self.ended = False
        self.ident: int | None = None
        self._target, self._args = target, args
        self._turn = threading.Semaphore(0)

    def start(self) -> None:
        self.troupe = self.troupe or troupe_of_caller()
        self.stage.actors.append(self)
        thread = threading.Thread(target=self._play, name=self.name, daemon=True)
        self.stage.threads.append(thread)
        thread.start()
        self.ident = thread.ident

    def join(self, timeout: float | None = None) -> None:
        self.stage.wait(lambda: self.ended, timeout)

    def is_alive(self) -> bool:
        return not self.ended

    def wait_for_turn(self) -> None:
        self._turn.acquire()
        if self.stage.over is not None:
            raise Stuck(self.stage.over)

    def give_turn(self) -> None:
        self._turn.release()

    def _play(self) -> None:
        _here.actor = self
        try:
            self.wait_for_turn()
            with Preempting(self.stage):
                self._target(*self._args)
        except BaseException:
            if self.stage.over is None:  # otherwise the simulation is over, and the actor is stopped
                raise
        finally:
            self.ended = True
            self.stage.leave(self)


def troupe_of_caller() -> object:
    return _here.actor.troupe


class Stage:
    """A simulation whose actors take turns.

    `turns`: the number of turns after which the simulation counts as endless. `often`: the fraction of calls
    to torch's functions before which another actor may continue.
    """

    def __init__(self, seed: int | str, *, turns: int = 200_000, often: float = 0.1) -> None:
        self.chance = random.Random(f"stage {seed}")
        self.actors: list[Actor] = []
        self.threads: list[threading.Thread] = []
        self.away: dict[object, float] = {}
        """For each stopped troupe, the simulated time at which it continues."""
        self.over: str | None = None
        self.now = 0.0
        self.order: list[str] = []
        """The name of the actor that had each turn."""
        self._turns, self.often = turns, often
        # As Burckhardt et al. (ASPLOS 2010): mostly the actor of the highest priority continues.
        self._by_priority = self.chance.random() < 0.5
        self._changes = 1 / self.chance.choice([10, 100, 1000])

    @contextmanager
    def open(self) -> Iterator[None]:
        """Run the calling thread and all threads that it starts as actors, and end the latter on exit."""
        main = Actor(self, target=lambda: None, name="main")
        self.actors.append(main)
        _here.actor = main
        try:
            yield
        finally:
            main.ended = True
            self.close(main)
            del _here.actor

    def close(self, main: Actor) -> None:
        """End the simulation and all actors except `main`, which could otherwise wait forever."""
        self.over = self.over or "the play is over"
        for actor in [actor for actor in self.actors if actor is not main]:
            actor.give_turn()
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive(), f"{thread.name} does not end"

    def wait(self, ready: Ready, timeout: float | None = None) -> bool:
        """Let other actors run until `ready()` is true; return False if the timeout ends first."""
        me: Actor = _here.actor
        me.ready, me.until = ready, FOR_EVER if timeout is None else self.now + timeout
        self._pass_on(me)
        return ready()

    def step_back(self) -> None:
        """Let any other actor that can run continue first."""
        self.wait(lambda: True)

    def sleep(self, seconds: float) -> None:
        """Sleep for this many seconds of simulated time."""
        until = self.now + seconds
        self.wait(lambda: self.now >= until, seconds)

    def leave(self, actor: Actor) -> None:
        self.actors.remove(actor)
        if self.over is None:
            self._pass_on(None)

    def freeze(self, troupe: object, seconds: float) -> None:
        """Stop the actors of `troupe` for this many simulated seconds."""
        self.away[troupe] = self.now + seconds

    def kill(self, troupe: object) -> None:
        """Stop the actors of `troupe` forever; they do not even run their `finally` blocks before the end."""
        self.away[troupe] = FOR_EVER

    def _pass_on(self, me: Actor | None) -> None:
        after = self._next()
        if self.over is not None:
            for actor in self.actors:
                if actor is not me:
                    actor.give_turn()
            if me is not None:
                raise Stuck(self.over)
            return
        assert after is not None
        self.order.append(after.name)
        if after is me:
            return
        after.give_turn()
        if me is not None:
            me.wait_for_turn()

    def _next(self) -> Actor | None:
        if len(self.order) > self._turns:
            self.over = f"no end after {self._turns} turns"
        while self.over is None:
            here = [actor for actor in self.actors if self.away.get(actor.troupe, 0.0) <= self.now]
            if able := [actor for actor in here if actor.until <= self.now or actor.ready()]:
                return self._drawn(able)
            moments = [*(actor.until for actor in here), *self.away.values()]
            self.now = min((moment for moment in moments if moment > self.now), default=FOR_EVER)
            if self.now == FOR_EVER:
                waiting = ", ".join(actor.name for actor in self.actors)
                self.over = f"everybody waits for somebody else: {waiting or 'nobody is left'}"
        return None

    def _drawn(self, able: Sequence[Actor]) -> Actor:
        if not self._by_priority:
            return self.chance.choice(able)
        first = max(able, key=lambda actor: actor.priority)
        if self.chance.random() < self._changes:
            first.priority = self.chance.random()
        return first


class Preempting(TorchFunctionMode):
    """Lets other actors continue before operations that read or write tensors, as these take time."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self._stage = stage

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        touches = name in READING or (name[-1] == "_" and name[0] != "_")
        if touches and self._stage.chance.random() < self._stage.often:
            self._stage.step_back()
        return func(*args, **(kwargs or {}))


class Lock:
    """A stand-in for `threading.Lock`."""

    def __init__(self, stage: Stage) -> None:
        self._stage, self._taken = stage, False

    def acquire(self) -> bool:
        self._stage.wait(lambda: not self._taken)
        self._taken = True
        return True

    def release(self) -> None:
        assert self._taken
        self._taken = False

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition(Lock):
    """A stand-in for `threading.Condition`, with the spurious wake-ups that the interface allows."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self._told = 0

    def notify_all(self) -> None:
        self._told += 1

    def wait(self, timeout: float | None = None) -> bool:
        heard = self._told
        self.release()
        told = self._stage.wait(lambda: self._told > heard, timeout)
        self.acquire()
        return told

    def wait_for(self, settled: Ready, timeout: float | None = None) -> bool:
        until = FOR_EVER if timeout is None else self._stage.now + timeout
        while not settled():
            left = until - self._stage.now
            if left <= 0:
                return False
            self.wait(None if left == FOR_EVER else left)
        return True


class Barrier:
    """A stand-in for `threading.Barrier`."""

    def __init__(self, stage: Stage, parties: int) -> None:
        self._stage, self._parties = stage, parties
        self._here, self._passed, self._broken = 0, 0, False

    def wait(self, timeout: float | None = None) -> None:
        turn = self._passed
        self._here += 1
        if self._here == self._parties:
            self._here, self._passed = 0, self._passed + 1
        through = self._stage.wait(lambda: self._passed > turn or self._broken, timeout)
        if self._passed == turn and (self._broken or not through):
            self._broken = True
            raise threading.BrokenBarrierError

    def abort(self) -> None:
        self._broken = True


class Queue:
    """A stand-in for `queue.SimpleQueue`."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._stage.step_back()

    def get(self) -> Any:
        self._stage.wait(lambda: bool(self._items))
        return self._items.popleft()


class Future:
    """A stand-in for `concurrent.futures.Future`."""

    def __init__(self, stage: Stage) -> None:
        self._stage, self._done = stage, False
        self._result: Any = None
        self._error: BaseException | None = None

    def set_result(self, result: Any) -> None:
        self._result, self._done = result, True

    def set_exception(self, error: BaseException) -> None:
        self._error, self._done = error, True

    def done(self) -> bool:
        return self._done

    def exception(self) -> BaseException | None:
        return self._error

    def result(self, timeout: float | None = None) -> Any:
        if not self._stage.wait(lambda: self._done, timeout):
            raise FutureTimeout
        if self._error is not None:
            raise self._error
        return self._result


def threading_of(stage: Stage) -> types.SimpleNamespace:
    """Return a stand-in for the module `threading`."""
    return types.SimpleNamespace(
        Thread=lambda **given: Actor(stage, **given),
        Lock=lambda: Lock(stage),
        Condition=lambda: Condition(stage),
        Barrier=lambda parties: Barrier(stage, parties),
        BrokenBarrierError=threading.BrokenBarrierError,
        current_thread=lambda: _here.actor,
        local=threading.local,
    )


def queue_of(stage: Stage) -> types.SimpleNamespace:
    return types.SimpleNamespace(SimpleQueue=lambda: Queue(stage))


@contextmanager
def staged(seed: int | str, *more: tuple[str, Callable[[Stage], Any]], **limits: Any) -> Iterator[Stage]:
    """Run ranks that are threads (`hpcsgd.comm.threads`) in turns on a stage.

    `more`: other names to replace, each with a function that makes the replacement.
    """
    stage = Stage(seed, **limits)
    replaced: list[tuple[str, Callable[[Stage], Any]]] = [
        ("hpcsgd.comm.threads.threading", threading_of),
        ("hpcsgd.comm.comm_thread.threading", threading_of),
        ("hpcsgd.comm.comm_thread.queue", queue_of),
        ("hpcsgd.comm.comm_thread.Future", lambda stage: lambda: Future(stage)),
        ("hpcsgd.methods.ad_psgd.threading", threading_of),
        *more,
    ]
    with ExitStack() as stack:
        for name, stand_in in replaced:
            stack.enter_context(mock.patch(name, stand_in(stage)))
        stack.enter_context(stage.open())
        yield stage
