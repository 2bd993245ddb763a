"""Carries gradients to the exchange while the backward pass goes on."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from weakref import WeakMethod

from torch import nn

from hpcsgd.core.flat import Bucket
from hpcsgd.core.layout import Slot
from hpcsgd.core.step import Departure, Exchange
from hpcsgd.errors import UserError
from hpcsgd.transport import Work, phase
from hpcsgd.transport.streams import Confluence, captured

log = logging.getLogger(__name__)


class GradientReducer:
    """Hands each bucket to `exchange` once its last gradient is there, always in the order of the buckets.

    Arrival order differs between ranks, so a bucket waits for those before it. What never became ready
    (parameters without a gradient in this step) leaves at `finish` and counts as zero. `departing` is
    asked when the first bucket of a step leaves.
    """

    def __init__(
        self,
        exchange: Exchange,
        buckets: Sequence[Bucket],
        departing: Callable[[], Departure],
        *,
        passes: int,
        overlap: bool,
    ) -> None:
        self._exchange = exchange
        self._departing = departing
        self._departure: Departure | None = None
        self.passes = passes
        """Backward passes before each `finish`; may change between two steps."""
        self._overlap = overlap
        self._buckets = buckets
        self._sent: list[Work] = []
        self._arrivals: dict[Slot, int] = {}
        self._missing = [0] * len(self._buckets)
        self._arrived_on = [Confluence(bucket.w.device) for bucket in buckets]
        self._version = 0
        self._exchanged = False
        self._warned = False
        self._reset()
        for index, bucket in enumerate(self._buckets):
            bucket.allocate()
            for place, slot in enumerate(bucket.slots):
                # torch does not say what a hook is.
                slot.param.register_post_accumulate_grad_hook(self._hook(index, place))  # pyright: ignore[reportUnknownMemberType]

    def finish(self) -> None:
        """Return once every bucket has been exchanged, at once if they have been since the last gradient
        arrived; it or `arriving` is called by every rank in every step."""
        for _ in self.arriving():
            pass

    def arriving(self) -> Iterator[Sequence[Bucket]]:
        """All buckets in their order, so many together as have been exchanged by the time that one waits for
        the first of them."""
        if self._exchanged:
            yield self._buckets
            return
        self._send_rest()
        waiting = list(self._sent)
        while waiting:
            arrived = self._arrived(waiting)
            first = len(self._sent) - len(waiting)
            del waiting[:arrived]
            yield self._buckets[first : first + arrived]
        self._reset()
        self._exchanged = True

    def settle(self) -> None:
        """`finish` if gradients have begun to leave, which may be so on some ranks alone: whatever else is
        sent before the update could overtake them."""
        if self._overlap and self.passes in self._arrivals.values():
            self.finish()

    def start_over(self) -> None:
        """The exchanged gradients have been used."""
        self._exchanged = False

    def _hook(self, index: int, place: int) -> Callable[[nn.Parameter], None]:
        # Python's garbage collector does not see what torch's hooks hold: all of it would stay for ever.
        arrive = WeakMethod(self._arrive)

        def arrived(_: nn.Parameter) -> None:
            if (reducer := arrive()) is not None:
                reducer(index, place)

        return arrived

    def _arrive(self, index: int, place: int) -> None:
        """The gradient of a bucket's parameter is there."""
        slot = self._buckets[index].slots[place]
        if not slot.at_home():
            return  # another DistributedOptimizer has it now, or step() will complain
        if captured(slot.param.device):
            raise UserError(
                "a backward pass is being captured as a CUDA graph, but messages between ranks cannot be "
                "replayed: train without CUDA graphs"
            )
        if index < len(self._sent):
            raise UserError(
                f"gradient of {slot.name} changed after it was sent: for several backward passes before "
                f"step() give DistributedOptimizer(accumulate=<passes>), now {self.passes}, "
                "or overlap=False"
            )
        self._exchanged = False
        slot.attach()
        self._arrived_on[index].join()
        self._arrivals[slot] = self._arrivals.get(slot, 0) + 1
        if self._arrivals[slot] == self.passes:
            self._missing[index] -= 1
        self._version = self._versions()
        if self._overlap and self._missing[index] == 0:
            self._send_ready()

    def _send_ready(self) -> None:
        ready = len(self._sent)
        while ready < len(self._buckets) and self._missing[ready] == 0:
            ready += 1
        with phase("gradients"):
            self._send_until(ready)

    def _send_rest(self) -> None:
        self._check_untouched()
        self._settle_missing()
        with phase("gradients"):
            self._send_until(len(self._buckets))

    def _arrived(self, waiting: Sequence[Work]) -> int:
        """How many are there, from the first on; waits for that one."""
        arrived = 0
        with phase("gradients"):
            for work in waiting:
                if arrived and not work.done():
                    break
                work.wait()
                arrived += 1
        return arrived

    def _send_until(self, stop: int) -> None:
        if self._departure is None:
            self._departure = self._departing()
        for index in range(len(self._sent), stop):
            bucket = self._buckets[index]
            self._arrived_on[index].precede()  # autograd has a stream for whatever was computed on one
            call = functools.partial(self._exchange, self._departure, bucket)
            work = self._departure.job.world.run(call, "exchange of gradients", bucket.gradients)
            self._sent.append(work)

    def _settle_missing(self) -> None:
        """Zero what got no gradient, take over what the user put in place of one."""
        unused: list[str] = []
        for bucket in self._buckets[len(self._sent) :]:
            for slot in bucket.slots:
                if slot not in self._arrivals and slot.gradient is None:
                    unused.append(slot.name)
                slot.attach()
        if unused and not self._warned:
            self._warned = True
            log.warning(
                "no gradient for %s: counted as zero, so that momentum and weight decay still act",
                _few(unused),
            )

    def _check_untouched(self) -> None:
        if self._sent and self._versions() != self._version:
            raise UserError(
                "gradients were changed between backward() and step(), after they had been sent: clip with "
                "optimizer.clip_grad_norm_(), or change them with DistributedOptimizer(overlap=False)"
            )

    def _versions(self) -> int:
        return sum(bucket.version() for bucket in self._buckets)

    def _reset(self) -> None:
        self._departure = None
        self._sent = []
        self._arrivals.clear()
        self._missing = [len(bucket.slots) for bucket in self._buckets]


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
