"""The reduction of gradients among ranks while the backward pass goes on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from weakref import WeakMethod

from hpcsgd import torch_private
from hpcsgd.comm import Communicator, phase
from hpcsgd.comm.streams import captured
from hpcsgd.core.agreement import Agreement, Call
from hpcsgd.core.flat import Bucket
from hpcsgd.core.slot import Slot
from hpcsgd.core.step import GradReduce, ReduceContext
from hpcsgd.engine import presence
from hpcsgd.engine.passes import PassCounts
from hpcsgd.engine.presence import Gradients, Presence, PresenceAgreement, Progress
from hpcsgd.engine.sending import SendsGradients, arrived, call_on_arrival, wait_for
from hpcsgd.engine.unused import Unused


class GradientReducer:
    """Reduces each bucket with `grad_reduce` once its last gradient is ready, in the order of the buckets.

    Gradients become ready in a different order on each rank, so a bucket waits for those before it. Buckets
    that did not become ready are sent by `finish`, with zeros for missing gradients. `departing` is called
    when the first bucket of a step is sent. Before every use of the averaged gradients, the ranks that share
    them compare their calls by `agreement`; `calling` makes a `Call` of a name. `group` has the ranks that
    share a model. `remembers`: the reduction keeps gradients for later steps. A missing gradient then counts
    as zero, as the kept ones are still added.
    """

    def __init__(
        self,
        grad_reduce: GradReduce,
        buckets: Sequence[Bucket],
        departing: Callable[[], ReduceContext],
        agreement: Callable[[], Agreement],
        calling: Callable[[str], Call],
        group: Communicator,
        *,
        passes: int,
        overlap: bool,
        remembers: bool,
    ) -> None:
        self._agreement, self._calling, self._group = agreement, calling, group
        self.remembers = remembers
        self.passes = PassCounts[Slot](passes, lambda slot: slot.gradient is not None)
        """The backward passes since the last `finish`."""
        self._overlap, self._buckets = overlap, buckets
        self._slots = [slot for bucket in buckets for slot in bucket.slots]
        self._divided = grad_reduce.traits.leaves_shards and any(bucket.cut_by_elements for bucket in buckets)
        self._sending = SendsGradients(grad_reduce, buckets, departing)
        self._had_graph = False  # True if a gradient of this step had a graph, which averaging would lose
        self._averaged = False
        """True if this step's gradients are averaged, and none was computed since."""
        self._whole = True
        """True if this rank has all of the gradients averaged last, not only its own part."""
        self._gradients = Gradients({})
        self._unused = Unused(self._slots)
        self._stale: set[Slot] = set()
        """Slots whose gradients were added to those of an earlier step: using them is an error."""
        self._reset()
        use = WeakMethod(self._use)
        for index, bucket in enumerate(self._buckets):
            bucket.allocate()
            for place, slot in enumerate(bucket.slots):
                slot.on_use(use)
                call_on_arrival(slot.param, self._gradient_ready, index, place)

    def absent(self) -> list[Slot]:
        """Return the parameters that have no gradient in this step, and are not to be updated.

        If the averager has added a gradient from other groups, the parameter has one.
        """
        found: list[Slot] = []
        for number, kind in self._gradients.missing.items():
            slot = self._slots[number]
            if kind is Presence.MISSING and slot.any():
                slot.show()
            else:
                found.append(slot)
        return found

    @property
    def progress(self) -> Progress:
        """Progress of the next step's gradients, including those set by the user."""
        if self._averaged:
            return Progress.AVERAGED
        there = self.passes.counts or any(s.gradient is not None and not s.is_attached() for s in self._slots)
        return Progress.RECEIVED if there else Progress.NONE

    @property
    def frozen(self) -> list[Slot]:
        """The parameters that do not require a gradient now, on this rank."""
        if len(self.passes.counts) == len(self._slots):
            return []
        return [
            slot for slot in self._slots if slot not in self.passes.counts and not slot.param.requires_grad
        ]

    def finish(self, call: Call) -> None:
        """Return once every bucket has been averaged; all ranks that share gradients are in one `call`."""
        for _ in self.received(call):
            pass

    def received(self, call: Call) -> Iterator[Sequence[Bucket]]:
        """Yield all buckets in their order, in lists of those that have been averaged since the last list."""
        if self._averaged or self._are_of_last_step():
            found = presence.found_again(self._buckets, self._gradients)
            self._conclude(found, self._begin_agreement(call, found))
            presence.blank_dropped(self._gradients, self._slots, self._buckets)
            yield self._buckets
            return
        gradients = presence.found(self._buckets, len(self._sending.sent), self.passes.counts, self._unused)
        agreement = self._begin_agreement(call, gradients)
        self._send_rest()
        waiting = list(self._sending.sent)
        while waiting:
            count = arrived(waiting)
            first = len(self._buckets) - len(waiting)
            if not first:
                self._conclude(gradients, agreement)
            del waiting[:count]
            if not waiting:
                self._reset()
                self._averaged, self._whole = True, not self._divided
            buckets = self._buckets[first : first + count]
            presence.blank_dropped(self._gradients, self._slots, buckets)
            if not self._divided:
                self._settle(buckets)
            yield buckets

    def synchronize(self, call: Call) -> None:
        """Return once `param.grad` is the whole averaged gradient, for every parameter with one on any rank.

        The training loop may then read and change `param.grad`; the update uses its values. Collective.
        """
        if self._had_graph:
            presence.refuse_graph()
        self.finish(call)
        if not self._whole:
            with phase("grad_reduce"):
                works = [self._group.allgather(b.g, b.grad_shard) for b in self._buckets if b.cut_by_elements]
                for work in works:
                    work.wait()
            self._whole = True
        self._settle(self._buckets)

    def scaled(self) -> None:
        """Record that gradients have been scaled, but only those that this rank uses in its update.

        A scale of NaN has made NaN of the zeros of missing gradients, too: they become zeros again.
        """
        for number, kind in self._gradients.missing.items():
            if kind is Presence.MISSING:
                self._slots[number].blank()
        if self._divided:
            self._whole = False
            for slot in self._slots:
                slot.pend()

    def zeroed(self) -> None:
        """Record that all gradients are zero now, so that this rank has all of them."""
        self._settle(self._buckets)

    def discard(self, name: str) -> None:
        """Discard the gradients of this step in the call `name`; collective if some have been sent."""
        if self._sending.sent:
            if self.remembers:
                presence.refuse_discard(name)
            agreement = self._begin_agreement(self._calling(name), Gradients({}))
            self._sending.send_until(len(self._buckets))
            wait_for(self._sending.sent)
            agreement.wait()
        self._unused.drop()
        self._reset()
        self._stale.clear()
        self._averaged = self._had_graph = False

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context whose backward passes add up gradients on this rank, as plain tensors."""
        return self.passes.no_sync(self._end_no_sync)

    def _end_no_sync(self, slots: Collection[Slot]) -> None:
        """Let the first use of the gradients of these `slots`, of passes inside `no_sync()`, average them."""
        for slot in slots:
            slot.attach()
            slot.pend()
        if slots:
            self._unused.look(self.passes.counts)

    def settle(self, call: Call) -> None:
        """Call `finish` if gradients have begun to be sent, perhaps only on some ranks.

        Otherwise other messages before the update could overtake the gradients.
        """
        if self._overlap and self.passes.expected in self.passes.counts.values():
            self.finish(call)

    def start_over(self) -> None:
        """Record that the averaged gradients have been used."""
        self._averaged = self._had_graph = False

    def _use(self) -> None:
        """Average all gradients, because one of them is used that is not averaged yet, or not whole."""
        if torch_private.in_backward():
            presence.refuse_in_backward()
        self.synchronize(self._calling("a use of param.grad"))

    def _gradient_ready(self, index: int, place: int) -> None:
        """Count a gradient that autograd has computed, and send buckets that are complete."""
        # The kernels of the backward pass push this code out of the core's caches, so that each call of a
        # Python function takes about 1 µs here. So checks that rarely find something are made without a call.
        slot = self._buckets[index].slots[place]
        if not slot.at_home():
            return  # the parameter belongs to another DistributedOptimizer now, or step() will raise an error
        if captured(slot.param.device):
            presence.refuse_capture()
        self._averaged = False
        may_be_stale = slot.is_attached() or slot in self.passes.counts
        if may_be_stale and not self._is_fresh(slot, was_sent=index < len(self._sending.sent)):
            self._stale.add(slot)
            return
        if self._unused.found or self._stale:
            self._unused.found.discard(slot)
            self._stale.discard(slot)
        if not self._unused.looks and not self.passes.in_no_sync:
            self._unused.look_after_pass(self.passes.counts)
        self._had_graph |= slot.attach()
        self._sending.gradient_ready(index)
        if not self.passes.in_no_sync:
            slot.pend()
        if self.passes.add(slot):
            self._missing[index] -= 1
            if self._overlap and self._missing[index] == 0:
                self._send_ready()

    def _is_fresh(self, slot: Slot, *, was_sent: bool) -> bool:
        """Return whether the latest gradient of `slot` was added to nothing, or to gradients of this step."""
        again = slot in self.passes.counts
        if slot.is_attached():
            if was_sent:
                presence.refuse_changed(slot, self.passes.expected)
            return again or not slot.pending or slot in self._unused
        if again and not (slot.gradient is not None and slot.gradient.requires_grad):
            self.discard("zero_grad()")  # model.zero_grad() was called since the last backward pass
        return True

    def _send_ready(self) -> None:
        incomplete = (index for index, missing in enumerate(self._missing) if missing)
        self._sending.send_until(next(incomplete, len(self._buckets)))

    def _send_rest(self) -> None:
        self._sending.require_unchanged()
        for slot in (slot for b in self._buckets[len(self._sending.sent) :] for slot in b.slots):
            of_this_step = slot in self.passes.counts or slot in self._unused
            if slot.pending and not of_this_step and slot.is_attached():
                presence.refuse_stale(slot)
            slot.attach()
            slot.pend()
        self._sending.send_until(len(self._buckets))

    def _begin_agreement(self, call: Call, gradients: Gradients) -> PresenceAgreement:
        return PresenceAgreement(self._agreement(), call, gradients, self._slots)

    def _conclude(self, mine: Gradients, agreement: PresenceAgreement) -> None:
        """Wait for the ranks' agreement, and set `param.grad` to None if no rank has a gradient."""
        self._gradients = agreement.wait()
        for number in mine.missing:
            slot = self._slots[number]
            if self.remembers and self._gradients.missing.get(number) is Presence.MISSING:
                # The reduction still adds what it has kept of earlier gradients.
                self._gradients = self._gradients.without(number)
            if number in self._gradients.missing:
                slot.hide()
                continue
            slot.show()
            if self._divided:
                slot.pend()

    def _are_of_last_step(self) -> bool:
        """Return whether the step uses the previous step's gradients, of which each rank has a part."""
        for slot in self._stale:
            if slot.is_attached():
                presence.refuse_stale(slot)
        return not self.passes.counts and self._divided and presence.are_of_last_step(self._slots)

    def _settle(self, buckets: Sequence[Bucket]) -> None:
        """Record that the gradients of these buckets are averaged, and that this rank has all of them."""
        for bucket in buckets:
            for slot in bucket.slots:
                slot.settle()

    def _reset(self) -> None:
        self._sending.start_over()
        self.passes.start_over()
        self._unused.forget()
        self._missing = [len(bucket.slots) for bucket in self._buckets]
