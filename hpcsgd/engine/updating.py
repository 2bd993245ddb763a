"""The local update of a step: of all at once, or of some buckets while others are on their way."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from torch import nn

from hpcsgd.core.agreement import Call
from hpcsgd.core.capabilities import is_piecemeal, is_regardless_of_gradients
from hpcsgd.core.flat import Bucket
from hpcsgd.core.layout import Slot
from hpcsgd.core.step import Averager, Exchange
from hpcsgd.engine.closures import Closure, Versions, unchanged, versions
from hpcsgd.engine.gradient_norm import GradientNorm
from hpcsgd.engine.in_parts import hooks_around_step, is_elementwise, is_tensorwise
from hpcsgd.engine.inside import optimizers_in
from hpcsgd.engine.joined import kind_of
from hpcsgd.engine.presence import Progress
from hpcsgd.engine.reducer import GradientReducer
from hpcsgd.engine.sharding import ShardedOptimizer
from hpcsgd.errors import UserError


class Updating:
    """Updates what has arrived where that changes nothing: the exchange is through with each bucket by
    itself, the averager does not look at gradients before, the optimizer is known to look at each element or
    tensor alone, and nobody else has hooks around its `step()`."""

    def __init__(
        self, local: ShardedOptimizer, reducer: GradientReducer | None, exchange: Exchange, how: Averager
    ) -> None:
        self._local, self._reducer = local, reducer
        by_itself = is_elementwise(local.optimizer) or is_tensorwise(local.optimizer)
        self._allowed = is_piecemeal(exchange) and is_regardless_of_gradients(how) and by_itself
        self._running = False
        self._passing = ""
        """The name of another method of the optimizer, while that runs."""
        self._used: Versions = []
        """The gradients of the last step, where they stay this rank's own."""
        self._call = Call("step()", 0)
        self.norm = GradientNorm(exchanged=reducer is not None)
        for each in optimizers_in(local.optimizer):
            each.register_step_pre_hook(self._only_from_here)

    def ready(self, call: Call) -> None:
        """Return once the step may begin: all gradients are there, or may come later; collective."""
        self._call = call
        if self._reducer is not None and not self._in_parts():
            self._reducer.finish(call)

    def finish(self, call: Call) -> None:
        """Return once all gradients have been averaged; collective."""
        if self._reducer is not None:
            self._reducer.finish(call)

    def synchronize(self, call: Call) -> None:
        """Return once `param.grad` is the averaged gradient of all parameters, whole; collective."""
        if self._reducer is not None:
            self._reducer.synchronize(call)

    def scaled(self) -> None:
        """What is to be updated by has been scaled, and nothing else of the gradients."""
        if self._reducer is not None:
            self._reducer.scaled()

    def take_back(self, name: str) -> None:
        """Forget the gradients of this step, in the call `name`; collective where some have been sent."""
        if self._reducer is not None:
            self._reducer.take_back(name)

    def settle(self, call: Call) -> None:
        """Return once those have been that are to leave before the update; collective."""
        if self._reducer is not None:
            self._reducer.settle(call)

    def start_over(self) -> None:
        """The exchanged gradients have been used, or are not to be."""
        if self._reducer is not None:
            self._reducer.start_over()
        elif not self._local.known:
            self._used = versions(self._local.held)

    @property
    def busy(self) -> bool:
        """Whether the optimizer is at work."""
        return self._running or bool(self._passing)

    @contextlib.contextmanager
    def passing(self, name: str, gradients: bool) -> Generator[None, None, None]:
        """In the block another method of the optimizer runs, of that `name`, with or without `gradients`."""
        if gradients:
            absent = self._absent()
        else:
            absent = {held.param for held in self._local.held if held.tensor is not held.param}
        self._passing = name
        try:
            with self._local.at_work(self._local.held, absent):
                yield
        finally:
            self._passing = ""
        if gradients:
            self.scaled()

    @contextlib.contextmanager
    def interrupted(self) -> Generator[None, None, None]:
        """In the block, which is within `step()` of the optimizer, the model is as that has made it so far.
        Afterwards it finds the gradients that are averaged then."""
        self._running = False
        with self._local.interrupted():
            yield
        self._running = True
        self._local.take_gradients(self._absent())

    @property
    def progress(self) -> Progress:
        """How far the gradients of the next step are."""
        if self._reducer is not None:
            return self._reducer.progress
        there = any(held.param.grad is not None for held in self._local.held)
        used = not there or unchanged(self._used, versions(self._local.held))
        return Progress.NONE if used else Progress.AVERAGED

    @property
    def remembers(self) -> bool:
        """Whether the exchange keeps what it has seen for later steps."""
        return self._reducer is not None and self._reducer.remembers

    def __call__(
        self, buckets: Sequence[Bucket], closure: Closure | None = None
    ) -> Iterator[Sequence[Bucket]]:
        """Updates all of them; gives, in their order, those that are through. The optimizer gets the
        `closure`, if any. Collective."""
        if self._reducer is None or not self._in_parts():
            for bucket in buckets:
                bucket.show_found()
            self.norm.see(buckets)
            self._update(functools.partial(self._local.step, self._absent(), closure))
            yield buckets
            return
        for arrived in self._reducer.arriving(self._call):
            self.norm.see(arrived)
            self._update(functools.partial(self._local.step_of, arrived, self._absent()))
            yield arrived

    def _absent(self) -> set[nn.Parameter]:
        return set() if self._reducer is None else {slot.param for slot in self._reducer.absent()}

    def accumulate(self, passes: int) -> None:
        """From the next step on so many backward passes come before each step."""
        if self._reducer is not None:
            self._reducer.passes = passes

    def frozen(self) -> list[Slot] | None:
        """The parameters that do not require a gradient now; None where this rank's gradients stay its own,
        and nobody looks at each."""
        return None if self._reducer is None else self._reducer.frozen

    def zeroed(self) -> None:
        """All gradients are zero now."""
        if self._reducer is not None:
            self._reducer.zeroed()

    def _in_parts(self) -> bool:
        hooks = hooks_around_step(self._local.optimizer)
        return self._allowed and all(hook == self._only_from_here for hook in hooks)

    def _update(self, step: Callable[[], None]) -> None:
        self._running = True
        try:
            step()
        finally:
            self._running = False

    def _only_from_here(self, *_: Any) -> None:
        if self._passing:
            raise UserError(
                f"{self._passing} of {kind_of(self._local.optimizer)} calls step() of an optimizer inside: "
                "call step(closure) of the DistributedOptimizer; the closure computes the loss and gradients"
            )
        if not self._running:
            raise UserError(
                "step() of the wrapped optimizer was called: call step() of the DistributedOptimizer"
            )
