"""The buckets of one step on their way: handed to the exchange in their order, and waited for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from weakref import WeakMethod

from torch import nn

from hpcsgd.comm import Work, doing, phase
from hpcsgd.comm.streams import Confluence
from hpcsgd.core.flat import Bucket
from hpcsgd.core.step import GradReduce, ReduceContext
from hpcsgd.errors import UserError


class SendsGradients:
    """Hands `buckets` to the `exchange`. `departing` is called when the first one of a step is sent; what is
    sent then belongs to what `activity` returns, such as "backward() of step 3"."""

    def __init__(
        self,
        exchange: GradReduce,
        buckets: Sequence[Bucket],
        departing: Callable[[], ReduceContext],
        activity: Callable[[], str],
    ) -> None:
        self._exchange, self._buckets = exchange, buckets
        self._departing, self._activity = departing, activity
        self._arrived_on = [Confluence(bucket.w.device) for bucket in buckets]
        self.start_over()

    def start_over(self) -> None:
        """The next bucket is the first one of a step."""
        self._context: ReduceContext | None = None
        self.sent: list[Work] = []
        """The exchanges of those that have been sent."""
        self._versions: list[int] = []
        self._doing = ""

    def gradient_ready(self, index: int) -> None:
        """Remember the stream on which a gradient of this bucket was computed: autograd has one for whatever
        was computed on one."""
        self._arrived_on[index].join()

    def send_until(self, stop: int) -> None:
        """Send all buckets before that number."""
        if self._context is None:
            self._context, self._doing = self._departing(), self._activity()
        with phase("gradients"), doing(self._doing):
            for index in range(len(self.sent), stop):
                bucket = self._buckets[index]
                self._arrived_on[index].precede()
                call = functools.partial(self._exchange, self._context, bucket)
                work = self._context.topology.world.run(call, "exchange of gradients", bucket.gradients)
                self.sent.append(work)
                self._versions.append(bucket.version())

    def require_unchanged(self) -> None:
        """Raise `UserError` if somebody has written into gradients since they were sent."""
        if self._versions != [bucket.version() for bucket in self._buckets[: len(self.sent)]]:
            raise UserError(
                "gradients were changed between backward() and step(), after they had been sent, by way of a "
                "tensor that is older: use param.grad itself, after backward()"
            )


def wait_for(works: Sequence[Work]) -> None:
    """Return once all of them are done."""
    with phase("gradients"):
        for work in works:
            work.wait()


def arrived(waiting: Sequence[Work]) -> int:
    """Wait for the first exchange, and return how many are over, from the first on."""
    count = 0
    with phase("gradients"):
        for work in waiting:
            if count and not work.done():
                break
            work.wait()
            count += 1
    return count


def call_on_arrival(param: nn.Parameter, method: Callable[..., None], *given: int) -> None:
    """Have the bound `method` called with what is `given` whenever a backward pass has brought a gradient of
    `param`. It is known by a weak reference: Python's garbage collector does not see what torch's hooks hold,
    and all of it would stay for ever.
    """
    known = WeakMethod(method)

    def hook(_: nn.Parameter) -> None:
        if (found := known()) is not None:
            found(*given)

    param.register_post_accumulate_grad_hook(hook)  # pyright: ignore[reportUnknownMemberType]
