"""Parameters and gradients as views of flat vectors.

    bucket       consecutive trainable parameters in backward order, of one dtype on one device: a vector w
                 and a vector g of reals, padded to a multiple of K; together the buckets are the model
    shard        1/K of a bucket: rank j of a group owns shard j of EVERY bucket; it cuts parameters anywhere,
                 or none if an optimizer has to see them whole (layout.py)
    slot         the place of one parameter in its bucket
    ShardRange   the part of one parameter that this rank owns

A complex number is a pair of reals in a bucket, and an element everywhere else (elements.py).

A shared (tied) parameter has one slot. Frozen parameters have none: they never change and are never sent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hpcsgd import torch_private
from hpcsgd.comm.streams import room_for
from hpcsgd.core.layout import Layout, cut
from hpcsgd.core.slot import Slot


@dataclass(frozen=True, slots=True)
class ShardRange:
    """The part of one parameter that this rank owns: elements [start, stop) in memory order."""

    slot: Slot
    start: int
    stop: int
    offset: int
    """Index in the bucket's `param_shard` of the element `start`."""

    @property
    def in_own(self) -> slice:
        """The range of this part's elements in the bucket's `param_shard`."""
        return slice(self.offset, self.offset + (self.stop - self.start) * self.slot.reals)

    @property
    def in_w(self) -> slice:
        """The range of this part's elements in the bucket's `w`."""
        start = self.slot.start + self.start * self.slot.reals
        return slice(start, start + (self.stop - self.start) * self.slot.reals)


class Bucket:
    """Some of the model's parameters, flattened: `w` has `size` elements, padding included.

    `param_shard` is a view of the size/K elements of `w` that this rank, with shard index j, owns. `g` and
    `grad_shard` are the same for gradients.
    """

    def __init__(self, layout: Layout, K: int, j: int) -> None:
        self.slots, self.size, self.whole = layout.slots, layout.size, layout.whole
        first = self.slots[0].param
        self.reals = self.slots[0].reals
        """Elements of `w` per element of a parameter, the same for all parameters of the bucket."""
        dtype = first.dtype.to_real()
        with room_for(f"no room for {self.size:,} parameters on {first.device}"):
            self.w = torch.zeros(self.size, dtype=dtype, device=first.device, pin_memory=layout.pinned)
        self._K, self._j = K, j
        self.param_shard = self.shard_of(self.w)
        self.ranges = list(
            _ranges(self.slots, j * self.param_shard.numel(), (j + 1) * self.param_shard.numel())
        )
        self.gathered = False
        """True once this step's gradients, if autograd left them in `param.grad`, have been copied to `g`."""
        self.received: Tensor | None = None
        """Memory in which a gradient reduction receives the gradients of the group."""
        self._tracked: Tensor | None = None
        self._g: Tensor | None = None
        for slot in self.slots:
            slot.move_into(self.w)

    @property
    def cut_by_elements(self) -> bool:
        """True if other ranks of the group own shards of `w`."""
        return self._K > 1

    @property
    def g(self) -> Tensor:
        """The gradients gathered from `param.grad`, and later the result of the gradient reduction."""
        assert self._g is not None, "no room for gradients: gather() comes first"
        return self._g

    @property
    def gradients(self) -> Tensor:
        """Return `g` without the padding behind the last parameter."""
        return self.g[: self.slots[-1].stop]

    @property
    def parameters(self) -> Tensor:
        """Return `w` without the padding behind the last parameter, whose length depends on K."""
        return self.w[: self.slots[-1].stop]

    @property
    def grad_shard(self) -> Tensor:
        return self.shard_of(self.g)

    @property
    def gradients_of_shard(self) -> Tensor:
        """Return `grad_shard` without the padding, which has to stay zero."""
        return self.grad_shard[: self.ranges[-1].in_own.stop if self.ranges else 0]

    @property
    def filled(self) -> list[slice]:
        """Ranges of `param_shard` that hold parameters; the rest is padding."""
        found: list[slice] = []
        for piece in self.ranges:
            start, stop = piece.in_own.start, piece.in_own.stop
            if found and found[-1].stop == start:
                start = found.pop().start
            found.append(slice(start, stop))
        return found

    def pieces(self, cuts: Sequence[slice] | None = None) -> Iterator[tuple[Slot, slice]]:
        """Yield each parameter's slot with the range of its part in `param_shard`.

        With `cuts`, which are slices of `param_shard`, ranges are those in the concatenation of the slices.
        """
        start = 0
        for part in [slice(0, self.param_shard.numel())] if cuts is None else cuts:
            for x in self.ranges:
                low, high = max(x.in_own.start, part.start), min(x.in_own.stop, part.stop)
                if low < high:
                    yield x.slot, slice(start + low - part.start, start + high - part.start)
            start += part.stop - part.start

    def shard_of(self, vector: Tensor) -> Tensor:
        """Return this rank's shard of a `vector` of the length of `w`."""
        return vector.view(self._K, -1)[self._j]

    def found(self) -> list[Tensor]:
        """Return the gradients in `param.grad` of the bucket's parameters; of a sparse one, its values."""
        return [values for slot in self.slots if (values := _values(slot)) is not None]

    def gather(self) -> None:
        """Copy gradients into `g`, unless they are there already, and make each `param.grad` a view of `g`.

        Where a parameter has no gradient, its part of `g` is set to zero, and `param.grad` stays None.
        """
        self.allocate()
        for slot in self.slots:
            slot.attach()
        self.gathered = True

    def show_found(self) -> None:
        """Set the missing `param.grad` of each parameter whose part of `g` is no longer zero.

        `gather` had set that part to zero. Since then the reduction has added gradients of other ranks.
        """
        if self.gathered:
            for slot in self.slots:
                if slot.gradient is None and slot.any():
                    slot.show()
            self.gathered = False

    def allocate(self) -> None:
        """Allocate memory for the bucket's gradients `g`, unless it has been allocated before."""
        if self._g is None:
            with room_for(f"no room for {self.size:,} gradients on {self.w.device}"):
                self._tracked = torch.zeros_like(self.w)
            self._g = self._tracked.data  # the same memory, but our own writes do not change its version
            for slot in self.slots:
                slot.make_room(self._tracked)

    def version(self) -> int:
        """Return a number that grows when other code writes into a gathered gradient in place."""
        return 0 if self._tracked is None else torch_private.version(self._tracked)


def flatten(
    named: Iterable[tuple[str, nn.Parameter]],
    K: int,
    j: int,
    bucket_bytes: float,
    whole: Collection[nn.Parameter] = frozenset(),
) -> list[Bucket]:
    """Make trainable parameters views of new buckets, which are returned, for rank `j` of a group of K.

    `whole`: parameters that must each be in one shard. Raises `UserError` for a parameter without a dense
    layout.
    """
    return [Bucket(layout, K, j) for layout in cut(named, K, bucket_bytes, whole)]


def _ranges(slots: Sequence[Slot], low: int, high: int) -> Iterator[ShardRange]:
    for slot in slots:
        start, stop = max(slot.start, low), min(slot.stop, high)
        if start < stop:
            first, end = ((x - slot.start) // slot.reals + slot.first for x in (start, stop))
            yield ShardRange(slot, first, end, start - low)


def _values(slot: Slot) -> Tensor | None:
    """Return the values of a gradient that autograd has set; a sparse one is coalesced first."""
    if (grad := slot.gradient) is None or not grad.is_sparse:
        return grad
    slot.param.grad = grad.coalesce()
    return slot.param.grad.values()
