"""Data injection: groups with different samples share a part of each batch (SelSync, section III-E).

In every step ⌈αP⌉ random groups send the fraction β of their batch to all others. Rank j of a group sends to
rank j of each other group. A rank's own batch shrinks to b' = b / (1 + αβP), eq. 3, so that all ranks train
on b samples. Batch sizes here and below are those of one rank. For b = 32 and 8 groups eq. 3 gives 10.7 at
(α, β) = (½, ½) and 5.8 at (¾, ¾): the 11 and 6 that the paper quotes, though for 10 groups.

The sizes are whole numbers, and all ranks train on exactly b samples: see `Injection.portions`. Seed, epoch
and step alone determine which groups share their samples, so that no message is needed for this choice.

    batches = hpcsgd.InjectedBatches(sampler, topology, b, hpcsgd.Injection(alpha=0.5, beta=0.5))
    loader = hpcsgd.Injected(DataLoader(data, batch_sampler=batches), topology)
    for x, y in loader: ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.utils.data
from torch import Tensor
from torch.utils.data import DataLoader

from hpcsgd.arguments import checked
from hpcsgd.comm import phase
from hpcsgd.core.topology import Topology
from hpcsgd.data.arguments import require_rows
from hpcsgd.data.assignment import Assignment
from hpcsgd.data.batches import Batches
from hpcsgd.data.rng import Purpose, shuffled
from hpcsgd.data.sampler import Sampler
from hpcsgd.data.split import Drawn
from hpcsgd.errors import UserError, count_text


class Portions(NamedTuple):
    """The composition of the b = b' + S·s samples that a rank trains on in a step.

    `own` (b') samples are those that the rank loads and does not share. Each of `sharers` (S) groups shares
    `shared` (s) samples with all groups.
    """

    own: int
    shared: int
    sharers: int


@checked
@dataclass(frozen=True)
class Injection:
    """The amount that groups share of each batch: the part of the groups, and the part of a batch.

    Injection helps where groups see different samples, as with `ByLabel`. It costs the bytes of the shared
    samples in every step.

    Args:
        alpha: α, the part of the groups that share in a step, > 0 and ≤ 1.
        beta: β, the part of a batch that each of these groups shares, > 0 and ≤ 1. The paper uses (α, β) =
            (½, ½) and (¾, ¾).

    Raises:
        UserError: If `alpha` or `beta` is outside these bounds.

    Example:
        >>> hpcsgd.Injection(alpha=0.5, beta=0.5).portions(b=32, P=8)
        Portions(own=12, shared=5, sharers=4)

    References:
        S. Tyagi, M. Swany, IEEE CLUSTER 2023 (arXiv:2307.07950), section III-E, eq. 3.

    See Also:
        `Injected`: the loader that sends the shared samples.
    """

    alpha: float
    beta: float

    def __post_init__(self) -> None:
        for name, value in (("alpha", self.alpha), ("beta", self.beta)):
            if not 0 < value <= 1:
                raise UserError(f"{name} = {value}: must be more than 0 and at most 1", key=name, value=value)

    def portions(self, b: int, P: int) -> Portions:
        """Return S = ⌈αP⌉, s = β·b/(1 + αβP) rounded, and b' = b − S·s, for batches of `b` samples per rank.

        s is at least 1, and leaves b' ≥ 1. Samples are whole and all ranks train on b of them, so b' changes
        in steps of S. Where αP is whole, b' is the possible value nearest to b/(1 + αβP) of eq. 3. For b =
        32 eq. 3 gives 10.67 at (α, β) = (½, ½) for `P` = 8 groups, 9.14 for 10, and 5.82 at (¾, ¾) for 8.
        Here b' is 12, 7 and 8; with s one larger it would be 8, 2 and 2. A single group keeps all samples.
        Raises `UserError` if b' would be less than 1 with s = 1.
        """
        if P == 1:
            return Portions(b, 0, 0)
        S = self._sharing(P)
        if b <= S:
            raise UserError(
                f"alpha = {self.alpha}: {S} of {count_text(P, 'group')} would share a sample each, which "
                "leaves none of "
                f"the {count_text(b, 'sample')} of a rank's batch: a larger batch is needed, or a smaller "
                "alpha",
                key="alpha",
                value=self.alpha,
            )
        s = max(1, min(round(self.beta * b / (1 + self.alpha * self.beta * P)), (b - 1) // S))
        return Portions(b - S * s, s, S)

    def sharers(self, P: int, seed: int, epoch: int, step: int) -> list[int]:
        """Return, in ascending order, which of `P` groups share samples in a step of an epoch.

        `step` and `epoch` are counted from 0. `seed` determines the choice.
        """
        groups = shuffled(np.arange(P), seed, Purpose.SHARERS, epoch, step)
        return sorted(groups[: self._sharing(P)].tolist())

    def _sharing(self, P: int) -> int:
        return ceil(self.alpha * P - 1e-9) if P > 1 else 0  # in floats, 0.07 · 100 is a little more than 7


@checked
class InjectedBatches(torch.utils.data.Sampler[list[int]]):
    """A batch sampler for `DataLoader(batch_sampler=...)` that yields the samples that this rank loads.

    In a step in which its group shares, a rank loads b' + s samples; otherwise it loads b'. Every step
    advances the epoch of the sampler by b' + s samples on every rank, so that all make equally many steps. A
    rank that does not share skips s of these samples and does not see them in this epoch. At the end of an
    epoch, fewer than b' + s samples per rank are left over. The skipped samples and those left over differ
    from epoch to epoch.

    Args:
        sampler: The `Sampler` of this rank.
        topology: The ranks and groups, from `init`.
        b: Samples that a rank trains on in a step, at least 1.
        injection: How much is shared.

    Raises:
        UserError: If `b` is below 1 or `injection` leaves a rank none of its b samples.

    Example:
        >>> sampler = hpcsgd.Sampler(data, topology)
        >>> batches = hpcsgd.InjectedBatches(sampler, topology, b=8, injection=hpcsgd.Injection(1.0, 0.5))
        >>> batches.portions     # both groups share 2 samples and keep 4 to themselves
        Portions(own=4, shared=2, sharers=2)

    References:
        S. Tyagi, M. Swany, IEEE CLUSTER 2023, section III-E.

    See Also:
        `Injected`: adds the samples that other groups share.
    """

    def __init__(self, sampler: Sampler, topology: Assignment, b: int, injection: Injection) -> None:
        if b < 1:
            raise UserError(f"b = {b}: at least 1 sample is needed")
        self.sampler = sampler
        self.shares_samples = True
        """True if groups send each other a part of each batch, as `Injected` does."""
        self.portions = injection.portions(b, topology.num_groups)
        self._injection = injection
        self._P, self._g = topology.num_groups, topology.group_index
        self._windows = Batches(sampler, self.per_step)

    def __len__(self) -> int:
        return len(self.sampler) // self.per_step

    def __iter__(self) -> Iterator[list[int]]:
        first = self.step
        for step, rows in zip(range(first, first + len(self)), self._windows, strict=False):
            yield Drawn(rows[: self.loaded(step)], self.sampler.seed, self.sampler.epoch)

    @property
    def step(self) -> int:
        """The number of the epoch's next step, counted from 0."""
        return self.sampler.taken // self.per_step

    def sharers(self, step: int) -> list[int]:
        """Return the groups that share samples in step number `step` of the epoch, counted from 0."""
        return self._injection.sharers(self._P, self.sampler.seed, self.sampler.epoch, step)

    def loaded(self, step: int) -> int:
        """Return how many samples this rank loads in step number `step` of the epoch, counted from 0."""
        return self.portions.own + (self.portions.shared if self._g in self.sharers(step) else 0)

    def weight(self, _: int) -> float:
        """Return the factor of a rank's mean loss: 1, since all ranks have equally many samples."""
        return 1.0

    def advance(self) -> None:
        """Move past the current batch, after all ranks of all groups have trained on it."""
        self.sampler.advance(self.per_step)

    @property
    def per_step(self) -> int:
        """Number of the sampler's samples that a step uses; the rank loads them or skips some."""
        return self.portions.own + self.portions.shared


@checked
class Injected:
    """The batches of a loader, completed by the samples that other groups share.

    A batch is a list or tuple of tensors, such as x and y, with one sample per row. Rows have the same shape
    and dtype in all batches of all groups. In a completed batch this rank's samples come first, then those
    of other groups, in the order of the groups. Samples travel as they were loaded: one message from every
    sharing group to each other group, sent in the thread that iterates. Their bytes count as phase
    "injection". Groups wait for each other here, with every method.

    Args:
        loader: A `DataLoader` with `InjectedBatches` as its batch_sampler.
        topology: The ranks and groups, from `init`. Making an `Injected` is collective: once, on all ranks.

    Raises:
        UserError: If the loader has another batch_sampler. When iterated: if batches are not made of tensors
            with a row per sample to load, or rows differ in shape or dtype.

    Example:
        >>> sampler = hpcsgd.Sampler(data, topology)
        >>> batches = hpcsgd.InjectedBatches(sampler, topology, b=8, injection=hpcsgd.Injection(1.0, 0.5))
        >>> loader = hpcsgd.Injected(DataLoader(data, batch_sampler=batches), topology)
        >>> x, y = next(iter(loader))
        >>> len(x)     # 6 loaded here, 2 of the other group
        8

    References:
        S. Tyagi, M. Swany, IEEE CLUSTER 2023 (arXiv:2307.07950), section III-E.

    See Also:
        `InjectedBatches`: what a rank loads itself.
    """

    def __init__(self, loader: DataLoader[Any], topology: Topology) -> None:
        batches = loader.batch_sampler
        if not isinstance(batches, InjectedBatches):
            raise UserError(
                f"Injected: expected DataLoader(..., batch_sampler=InjectedBatches(...)), "
                f"given one with {type(batches).__name__}"
            )
        self._loader, self._batches = loader, batches
        self._rows: list[str] = []  # of the first batch of each group
        self._g, self._P = topology.group_index, topology.num_groups
        # A method's messages may be in flight on inter_group, so injection has its own communicator.
        self._inter_group = (
            topology.inter_group.dup_with_thread() if topology.num_groups > 1 else topology.inter_group
        )

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        for step, batch in enumerate(self._loader, self._batches.step):
            yield self.complete(batch, step)

    def complete(self, batch: Sequence[Tensor], step: int | None = None) -> tuple[Tensor, ...]:
        """Return `batch`, followed by the samples that other groups share in this `step`; collective.

        `step` is counted from 0 in the epoch; by default it is the one that training has reached.
        """
        step = self._batches.step if step is None else step
        require_rows(batch, self._batches.loaded(step))
        self._require_alike(" and ".join(f"{x.dtype} {list(x.shape[1:])}" for x in batch))
        s, sharers = self._batches.portions.shared, self._batches.sharers(step)
        others = [g for g in range(self._P) if g != self._g]
        send = dict.fromkeys(others, _packed([x[-s:] for x in batch])) if self._g in sharers else {}
        arriving = {g: _room(batch, s) for g in others if g in sharers}
        if send or arriving:
            with phase("injection"):
                self._inter_group.sendrecv(send, arriving).wait()
        received = [_unpacked(message, batch, s) for message in arriving.values()]
        return tuple(torch.cat(parts) for parts in zip(batch, *received, strict=True))

    def _require_alike(self, rows: str) -> None:
        """Raise `UserError` unless the first batch of each group had such `rows`; they are compared once."""
        if not self._rows and self._P > 1:
            with phase("injection"):
                self._rows = self._inter_group.gather_objects(rows)
        if other := next((other for other in self._rows if other != rows), None):
            raise UserError(
                f"injection: rows of {rows} and of {other}: all batches of all groups need the same: pad them"
            )


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.contiguous().view(-1).view(torch.uint8) for x in tensors])


def _room(like: Sequence[Tensor], rows: int) -> Tensor:
    """Return an uninitialized buffer for a message with `rows` rows of each tensor in `like`."""
    width = sum(x[0].numel() * x.element_size() for x in like)
    return torch.empty(rows * width, dtype=torch.uint8, device=like[0].device)


def _unpacked(message: Tensor, like: Sequence[Tensor], rows: int) -> list[Tensor]:
    """Return the tensors in `message`: `rows` rows each, shaped otherwise like those in `like`."""
    sizes = [rows * x[0].numel() * x.element_size() for x in like]
    parts = zip(message.split(sizes), like, strict=True)
    return [part.clone().view(x.dtype).view(rows, *x.shape[1:]) for part, x in parts]  # a clone is aligned
