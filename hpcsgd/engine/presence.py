"""Which parameters have a gradient on each rank, and what happens if the ranks differ.

As in plain PyTorch and in DistributedDataParallel, a parameter is updated only if it has a gradient. It may
have one on some ranks only. On the other ranks its gradient then counts as zero. If no rank has a gradient,
the parameter is not updated. Ranks first compare a checksum of the missing gradients, and the list of missing
gradients only if the checksums differ.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NoReturn

from hpcsgd.core.agreement import Agreement, Call
from hpcsgd.core.flat import Bucket
from hpcsgd.core.slot import Slot
from hpcsgd.errors import UserError


class Presence(IntEnum):
    """The state of a gradient on one rank."""

    THERE = 0
    MISSING = 1
    """No backward pass of this step has computed the gradient."""
    DROPPED = 2
    """The gradient was sent, and the training loop has set it to None since."""
    FROZEN = 3
    """The parameter does not require a gradient."""


class Progress(IntEnum):
    """How far the gradients of a step are on one rank: not computed, computed, or averaged."""

    NONE = 0
    """No backward pass has computed a gradient since the last step."""
    RECEIVED = 1
    AVERAGED = 2


@dataclass(frozen=True)
class Gradients:
    """The parameters that have no gradient on one rank, or on none of several ranks.

    Parameters are numbered in the order in which they lie in the buckets.
    """

    missing: Mapping[int, Presence]
    """Why the gradient is missing, by the parameter's number."""

    @property
    def digest(self) -> int:
        """A checksum of the missing gradients, to compare ranks; 0 if none is missing."""
        text = repr(sorted((number, int(kind)) for number, kind in self.missing.items()))
        return zlib.crc32(text.encode()) if self.missing else 0

    def without(self, number: int) -> Gradients:
        """Return a copy in which the gradient of parameter `number` is not missing."""
        return Gradients({other: kind for other, kind in self.missing.items() if other != number})

    def packed(self, count: int) -> bytes:
        """Return one byte, the `Presence` of the gradient, for each of `count` parameters."""
        return bytes(self.missing.get(number, Presence.THERE) for number in range(count))


def found(
    buckets: Sequence[Bucket], sent: int, arrived: Mapping[Slot, int], unused: Container[Slot]
) -> Gradients:
    """Return which gradients of this step are missing; the first `sent` buckets have been sent.

    Gradients of `unused` parameters count as missing, even if `param.grad` is a tensor.

    Raises:
        UserError: If a gradient has been replaced after it was sent.
    """
    missing: dict[int, Presence] = {}
    number = 0
    for index, bucket in enumerate(buckets):
        for slot in bucket.slots:
            if slot not in arrived or not slot.is_attached():
                kind = Presence.MISSING if slot in unused else _kind(slot, was_sent=index < sent)
                if kind is not Presence.THERE:
                    missing[number] = kind
            number += 1
    return Gradients(missing)


def found_again(buckets: Sequence[Bucket], before: Gradients) -> Gradients:
    """Return which averaged gradients are missing now; `before` has those that were missing earlier.

    A gradient that the training loop has replaced counts with its new value.
    """
    missing: dict[int, Presence] = {}
    slots = (slot for bucket in buckets for slot in bucket.slots)
    for number, slot in enumerate(slots):
        if not slot.param.requires_grad:
            missing[number] = Presence.FROZEN
        elif slot.gradient is None:
            missing[number] = before.missing.get(number, Presence.DROPPED)
        else:
            slot.attach()
    return Gradients(missing)


def are_of_last_step(slots: Sequence[Slot]) -> bool:
    """Return whether all gradients are still those of the previous step, of which each rank has a part."""
    there = [slot for slot in slots if slot.gradient is not None]
    return bool(there) and all(slot.pending and slot.is_attached() for slot in there)


def blank_dropped(gradients: Gradients, slots: Sequence[Slot], buckets: Sequence[Bucket]) -> None:
    """Fill a gradient in `buckets` with zeros if the script set it to None after it had been sent."""
    dropped = {slots[number] for number, kind in gradients.missing.items() if kind is Presence.DROPPED}
    for slot in (slot for bucket in buckets for slot in bucket.slots if slot in dropped):
        slot.blank()


class PresenceAgreement:
    """An agreement of ranks on a `call` and on which gradients are missing. Collective.

    `mine` are the gradients of this rank, and `slots` the slots of all parameters.
    """

    def __init__(self, agreement: Agreement, call: Call, mine: Gradients, slots: Sequence[Slot]) -> None:
        self._agreement, self._mine, self._slots = agreement, mine, slots
        self._comparison = agreement.begin(call, mine.digest)

    def wait(self) -> Gradients:
        """Return which gradients are missing on all ranks.

        Raises:
            UserError: As in `Comparison.wait` and `united`.
        """
        if self._comparison.wait():
            return self._mine
        ranks = self._agreement.presence(self._mine.packed(len(self._slots)))
        return united(ranks, [slot.name for slot in self._slots], self._agreement.world_rank)


def united(ranks: Sequence[bytes], names: Sequence[str], world_rank: Callable[[int], int]) -> Gradients:
    """Return which gradients are missing on all ranks, from each rank's byte per parameter.

    A byte is a `Presence`, as in `Gradients.packed`.

    Raises:
        UserError: If only some ranks have frozen a parameter, or dropped its gradient after it was sent.
    """
    missing: dict[int, Presence] = {}
    for number, kinds in enumerate(zip(*ranks, strict=True)):
        if any(kinds):
            reported = [Presence(kind) for kind in kinds]
            _require_possible(reported, names[number], world_rank)
            if Presence.THERE not in reported:
                missing[number] = max(reported)
    return Gradients(missing)


def refuse_stale(slot: Slot) -> NoReturn:
    """Raise `UserError` for a gradient that was added to an older one that this rank has only partly."""
    raise UserError(
        f"gradient of {slot.name} was added to that of an earlier step, or to one that has been averaged and "
        "clipped, of which this rank does not keep all: call optimizer.zero_grad() between step() and the "
        "next backward(), or optimizer.synchronize() before a further backward() of one step"
    )


def refuse_in_backward() -> NoReturn:
    """Raise `UserError` for a gradient that is used while others are computed."""
    raise UserError(
        "a gradient was used during backward(), before it was averaged: use it after "
        "backward(), or, in a hook, register the hook before DistributedOptimizer is made"
    )


def refuse_capture() -> NoReturn:
    """Raise `UserError` for a backward pass that CUDA records instead of running it."""
    raise UserError(
        "a backward pass is being captured as a CUDA graph, but messages between ranks cannot be "
        "replayed: train without CUDA graphs"
    )


def refuse_graph() -> NoReturn:
    """Raise `UserError` for averaged gradients of `backward(create_graph=True)`, which have no graph."""
    raise UserError(
        "gradients of backward(create_graph=True) are used, but averaged gradients have no graph: compute "
        "what you differentiate by torch.autograd.grad(loss, parameters, create_graph=True), and clip by "
        "optimizer.clip_grad_norm_()"
    )


def refuse_discard(name: str) -> NoReturn:
    """Raise `UserError` for a call `name` that drops gradients of which the reduction has kept a part."""
    raise UserError(
        f"{name} after gradients were sent, of which this method's gradient reduction keeps a part: make "
        "DistributedOptimizer with overlap_grad_reduce=False, or set requires_grad_(False) for parameters "
        "whose gradients are not used"
    )


def refuse_changed(slot: Slot, passes: int) -> NoReturn:
    """Raise `UserError` for a gradient that a further backward pass changed after it was sent."""
    raise UserError(
        f"gradient of {slot.name} changed after it was sent: call optimizer.zero_grad() before backward(); "
        "for several backward passes before step() give "
        "DistributedOptimizer(gradient_accumulation_steps=<passes>), now "
        f"{passes}, or overlap_grad_reduce=False, or make all but the last inside optimizer.no_sync()"
    )


def _kind(slot: Slot, *, was_sent: bool) -> Presence:
    if not slot.param.requires_grad:
        return Presence.FROZEN
    if slot.gradient is None:
        return Presence.DROPPED if was_sent else Presence.MISSING
    if was_sent:
        raise UserError(
            f"the gradient of {slot.name} was replaced between backward() and step(), while it was "
            "being averaged: call optimizer.synchronize() before you replace gradients"
        )
    return Presence.THERE


def _require_possible(kinds: Sequence[Presence], name: str, world_rank: Callable[[int], int]) -> None:
    """Raise `UserError` unless all ranks or none have frozen the parameter or dropped a sent gradient."""
    there = [rank for rank, kind in enumerate(kinds) if kind is Presence.THERE]
    for rank, kind in enumerate(kinds):
        if kind is Presence.FROZEN and set(kinds) != {kind}:
            other = next(i for i, k in enumerate(kinds) if k is not kind)
            raise UserError(
                f"parameter {name} is frozen (requires_grad = False) on rank {world_rank(rank)} and "
                f"not on rank {world_rank(other)}: freeze it on all ranks"
            )
        if kind is Presence.DROPPED and there:
            raise UserError(
                f"the gradient of {name} was set to None after backward() on rank {world_rank(rank)}, "
                f"and not on rank {world_rank(there[0])}: it has been sent already"
            )
