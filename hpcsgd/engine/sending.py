"""The gradient reductions of one step: they begin in the order of the buckets, and are waited for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import MethodType
from weakref import ref

from torch import nn

from hpcsgd.comm import Work, doing, phase
from hpcsgd.comm.streams import Confluence
from hpcsgd.core.flat import Bucket
from hpcsgd.core.step import GradReduce, ReduceContext
from hpcsgd.errors import UserError


class SendsGradients:
    """The sender of `buckets`: it runs the gradient reduction `grad_reduce` on each of them.

    When it sends the first bucket of a step, it calls `departing`, which returns the context of the step's
    reductions.
    """

    def __init__(
        self,
        grad_reduce: GradReduce,
        buckets: Sequence[Bucket],
        departing: Callable[[], ReduceContext],
    ) -> None:
        self._grad_reduce, self._buckets, self._departing = grad_reduce, buckets, departing
        self._arrived_on = [Confluence(bucket.w.device) for bucket in buckets]
        self.start_over()

    def start_over(self) -> None:
        """Forget the reductions of the last step, so that the first bucket of the next one can be sent."""
        self._context: ReduceContext | None = None
        self.sent: list[Work] = []
        """The reductions of the buckets that have been sent."""
        self._versions: list[int] = []

    def gradient_ready(self, index: int) -> None:
        """Remember the current stream, on which a gradient of bucket `index` was computed."""
        self._arrived_on[index].join()

    def send_until(self, stop: int) -> None:
        """Send all buckets before number `stop` that have not been sent."""
        if self._context is None:
            self._context = self._departing()
        context = self._context
        with phase("grad_reduce"), doing(f"backward() of step {context.t}"):
            for index in range(len(self.sent), stop):
                bucket = self._buckets[index]
                self._arrived_on[index].precede()
                call = functools.partial(self._grad_reduce, context, bucket)
                work = context.topology.world.run(call, "gradient reduction", bucket.gradients)
                self.sent.append(work)
                self._versions.append(bucket.version())

    def require_unchanged(self) -> None:
        """Raise `UserError` if gradients were written to since they were sent."""
        if self._versions != [bucket.version() for bucket in self._buckets[: len(self.sent)]]:
            raise UserError(
                "gradients were changed between backward() and step(), after they had been sent, by way of a "
                "tensor that is older: use param.grad itself, after backward()"
            )


def wait_for(works: Sequence[Work]) -> None:
    """Wait for all reductions in `works`."""
    with phase("grad_reduce"):
        for work in works:
            work.wait()


def arrived(waiting: Sequence[Work]) -> int:
    """Wait for the first of the `waiting` reductions; return how many, from the first on, are done then."""
    count = 0
    with phase("grad_reduce"):
        for work in waiting:
            if count and not work.done():
                break
            work.wait()
            count += 1
    return count


def call_on_arrival(param: nn.Parameter, method: MethodType, *given: int) -> None:
    """Call the bound `method` with `given` whenever a backward pass has computed a gradient of `param`.

    The hook holds a weak reference. Python's garbage collector does not see what torch's hooks hold, so with
    a strong one the object would never be freed.
    """
    owner, function = ref(method.__self__), method.__func__  # a `WeakMethod` takes twice as long to call

    def hook(_: nn.Parameter) -> None:
        if (found := owner()) is not None:
            function(found, *given)

    param.register_post_accumulate_grad_hook(hook)  # pyright: ignore[reportUnknownMemberType]
