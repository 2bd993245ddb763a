"""The local update of a step: of all buckets at once, or of some while others are being reduced."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from torch import nn, optim

from hpcsgd.core.agreement import Call
from hpcsgd.core.flat import Bucket
from hpcsgd.core.slot import Slot
from hpcsgd.engine.chained import kind_of
from hpcsgd.engine.closures import Closure, Versions, unchanged, versions
from hpcsgd.engine.gradient_norm import GradientNorm
from hpcsgd.engine.inside import optimizers_in
from hpcsgd.engine.passes import PassCounts, Passes
from hpcsgd.engine.presence import Progress
from hpcsgd.engine.reducer import GradientReducer
from hpcsgd.engine.sharding import ShardedOptimizer
from hpcsgd.errors import UserError
from hpcsgd.torch_private import hooks_of


class LocalUpdate:
    """Runs the local update, bucket by bucket where that gives the same result.

    Two conditions must hold for that: the plan of the step allows it, and no other code has hooks around the
    optimizer's `step()`.
    """

    def __init__(self, local: ShardedOptimizer, reducer: GradientReducer | None, *, per_bucket: bool) -> None:
        """Prepare for updates of `local`; `per_bucket` is `StepPlan.update_per_bucket`."""
        self._local, self._reducer, self._allowed = local, reducer, per_bucket
        self._running = self._per_bucket = False
        self._passing = ""
        """The name of the optimizer's method, other than `step()`, that is running; "" if none is."""
        self._used: Versions = []
        """Versions of the last step's gradients, if gradients are not reduced."""
        self._unreduced = Passes([held.param for held in local.held]) if reducer is None else None
        self._call = Call("step()", 0)
        self.norm = GradientNorm(reduced=reducer is not None)
        self._optimizers = optimizers_in(local.optimizer)
        for each in self._optimizers:
            each.register_step_pre_hook(self._only_from_here)

    def ready(self, call: Call) -> None:
        """Return once the step may begin. Collective.

        All gradients have been averaged then, unless the update runs bucket by bucket.
        """
        self._call = call
        hooks = self._hooks_inside()
        if hooks and not self._local.whole:
            raise UserError(
                f"a hook around step() was registered inside {kind_of(self._local.optimizer)}, where it "
                "would see only the parts that this rank updates: register it on the DistributedOptimizer"
            )
        self._per_bucket = self._allowed and not hooks
        if self._reducer is not None and not self._per_bucket:
            self._reducer.finish(call)

    def finish(self, call: Call) -> None:
        """Return once all gradients have been averaged; collective."""
        if self._reducer is not None:
            self._reducer.finish(call)

    def synchronize(self, call: Call) -> None:
        """Wait until every `param.grad` is the whole gradient, averaged over the group; collective."""
        if self._reducer is not None:
            self._reducer.synchronize(call)

    def scaled(self) -> None:
        """Record that gradients have been scaled, but only those that this rank uses in its update."""
        if self._reducer is not None:
            self._reducer.scaled()

    def discard(self, name: str) -> None:
        """Discard the gradients of this step in the call `name`; collective if some have been sent."""
        if self._reducer is not None:
            self._reducer.discard(name)
        if self._unreduced is not None:
            self._unreduced.passes.start_over()

    def settle(self, call: Call) -> None:
        """Return once all gradients that must be sent before the update have been averaged; collective."""
        if self._reducer is not None:
            self._reducer.settle(call)

    def start_over(self) -> None:
        """Record that the reduced gradients have been used, or will not be used."""
        if self._unreduced is not None:
            self._unreduced.passes.start_over()
        if self._reducer is not None:
            self._reducer.start_over()
        elif not self._local.known:
            self._used = versions(self._local.held)

    @property
    def busy(self) -> bool:
        """True while the optimizer runs."""
        return self._running or bool(self._passing)

    @contextlib.contextmanager
    def passing(self, name: str, gradients: bool) -> Generator[None, None, None]:
        """Let a method of the optimizer other than `step()`, called `name`, run in the block.

        `gradients`: the method sees averaged gradients.
        """
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
        """In the block, let the model have the values that the running `step()` has reached so far.

        After the block, the optimizer gets the gradients that have been averaged by then.
        """
        self._running = False
        with self._local.interrupted():
            yield
        self._running = True
        self._local.take_gradients(self._absent())

    @property
    def progress(self) -> Progress:
        """Progress of the next step's gradients."""
        if self._reducer is not None:
            return self._reducer.progress
        there = any(held.param.grad is not None for held in self._local.held)
        used = not there or unchanged(self._used, versions(self._local.held))
        return Progress.NONE if used else Progress.AVERAGED

    @property
    def remembers(self) -> bool:
        """True if the gradient reduction keeps gradients for later steps."""
        return self._reducer is not None and self._reducer.remembers

    def __call__(self, buckets: Sequence[Bucket], closure: Closure | None = None) -> Iterator[Bucket]:
        """Update all buckets; yield each, in their order, once it is updated.

        The optimizer gets the `closure`, if any. Collective.
        """
        if self._reducer is None or not self._per_bucket:
            for bucket in buckets:
                bucket.show_found()
            self.norm.see(buckets)
            self._update(functools.partial(self._local.step, self._absent(), closure))
            yield from buckets
            return
        for arrived in self._reducer.received(self._call):
            self.norm.see(arrived)
            self._update(functools.partial(self._local.step_of, arrived, self._absent()))
            yield from arrived

    def _absent(self) -> set[nn.Parameter]:
        return set() if self._reducer is None else {slot.param for slot in self._reducer.absent()}

    def accumulate(self, passes: int) -> None:
        """Expect `passes` backward passes before each step, from the next step on."""
        if self._reducer is not None:
            self._reducer.passes.expected = passes
        if self._unreduced is not None:
            self._unreduced.expect(passes)

    @property
    def unfinished(self) -> str:
        """The backward passes of a step without its last one, in words; "" if there are none."""
        return self._passes.unfinished

    @property
    def in_no_sync(self) -> bool:
        """True inside `no_sync()`."""
        return self._passes.in_no_sync

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context whose backward passes leave gradients on this rank."""
        if self._reducer is not None:
            return self._reducer.no_sync()
        assert self._unreduced is not None
        self._unreduced.count()
        return self._passes.no_sync(lambda _: None)

    @property
    def _passes(self) -> PassCounts[Any]:
        if self._reducer is not None:
            return self._reducer.passes
        assert self._unreduced is not None
        return self._unreduced.passes

    def frozen(self) -> list[Slot] | None:
        """Return the parameters that do not require a gradient now; None if gradients are not reduced."""
        return None if self._reducer is None else self._reducer.frozen

    def zeroed(self) -> None:
        """Record that all gradients are zero now."""
        if self._reducer is not None:
            self._reducer.zeroed()

    def _hooks_inside(self) -> bool:
        """Return whether there are hooks around `step()` of optimizers inside the wrapped one."""
        return any(hook != self._only_from_here for each in self._optimizers[1:] for hook in hooks_of(each))

    def _update(self, step: Callable[[], None]) -> None:
        self._running = True
        try:
            step()
        finally:
            self._running = False

    def _only_from_here(self, optimizer: optim.Optimizer, *_: Any) -> None:
        if all(optimizer is not each for each in self._optimizers):
            return  # this is the outer optimizer, which shares the hooks
        if self._passing:
            raise UserError(
                f"{self._passing} of {kind_of(self._local.optimizer)} calls step() of an optimizer inside: "
                "call step(closure) of the DistributedOptimizer; the closure computes the loss and gradients"
            )
        if not self._running:
            raise UserError(
                "step() of the wrapped optimizer was called: call step() of the DistributedOptimizer"
            )
