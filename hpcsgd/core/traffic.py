"""What a method sends and keeps, told beforehand: the operations of a step and their bytes.

Parts of a method that send something have `sends` (`hpcsgd.core.optional`), beside the code that does it and
in the terms of their paper. `hpcsgd.cost` puts the parts together as the engine does and asks a machine what
it takes; a test holds all of it against what the ledger has counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn

from hpcsgd.core.elements import num_reals
from hpcsgd.core.layout import cut
from hpcsgd.core.rows import Unit, in_buckets, padded, positions, units_of

Over = Literal["group", "cross", "world", "peers"]
"""The communicators of a `Topology`; peers are jobs of their own, and what goes to them is in no ledger."""
Stage = Literal["exchange", "model_average", "gather", "forward", "backward", "reduce"]
"""The last three are torch's, where it shards the model: weights gathered for either pass, gradients."""
FLOAT64 = 8
"""Bytes of a norm, a loss or a count."""


@dataclass(frozen=True)
class CommOp:
    """An operation that every rank takes part in."""

    operation: str
    """As `Communicator` calls it."""
    over: Over
    nbytes: float
    """n: the whole vector of an alltoall, reduce_scatter, allreduce or bcast, what an allgather gathers, what
    an exchange sends to all its peers; the mean over the ranks."""
    phase: str = ""
    """Under which the ledger counts it; "": that of whoever asks."""
    times: float = 1.0
    """A step, or a meeting, on the mean."""
    bucket: int | None = None
    """It is of this bucket and leaves when that is there, others being on their way or not; None: it leaves
    when all before it is done. Of torch's messages: the unit."""
    stage: Stage = "exchange"
    """Which one of a step it is part of."""
    overlap_steps: int = 0
    """How many of the next steps are computed while it travels; 0: it is waited for."""
    reduced: float = 0.0
    """Elements that came with it, of which the rank then makes means."""
    off_host_fraction: float = 1.0
    """Of an exchange, the part that goes to other hosts, if it goes to any."""
    sender_fraction: float = 1.0
    """The part of the ranks that send it; the others wait."""
    contention: float = 1.0
    """How many times as long it takes on the mean, since several may come to one rank."""

    def within(self, phase: str, share: float = 1.0) -> CommOp:
        """It, counted under `phase` where it has none of its own, in this `share` of all steps."""
        return replace(self, phase=self.phase or phase, times=self.times * share)


@dataclass(frozen=True)
class BucketLayout:
    """One bucket: its elements without and with padding."""

    used: int
    padded: int
    width: int
    """Bytes of an element."""
    whole: bool = False
    """Whether no chunk cuts a parameter."""

    @property
    def nbytes(self) -> int:
        return self.padded * self.width

    @property
    def wide(self) -> int:
        """Bytes of an element where sums of 16-bit numbers are made."""
        return max(self.width, 4)


@dataclass(frozen=True)
class ModelLayout:
    """What the bytes of a step go by: P groups of K, and a model as the engine lays it out."""

    P: int
    K: int
    buckets: tuple[BucketLayout, ...]
    layers: tuple[int, ...] = ()
    """Elements of each parameter, bucket by bucket."""
    optimizer_state: Mapping[str, Collection[int]] = field(default_factory=dict[str, Collection[int]])
    """Of each of the optimizer's state tensors that are like a parameter: which of `layers` have it."""
    numbers: Mapping[str, Collection[int]] = field(default_factory=dict[str, Collection[int]])
    """Likewise of its tensors of one float32 for every piece of a parameter."""
    buffers: tuple[int, ...] = ()
    """Bytes of all float buffers of the model, one entry a dtype."""
    ranks_per_host: int | None = None
    """None: as many as a group has."""
    units: tuple[Unit, ...] = ()
    """Where torch shards the model over the group: what it gathers as one, in the order of the backward pass.
    Else none."""
    having: tuple[int, ...] = ()
    """There, of each of `layers` the positions that have rows of it."""

    @classmethod
    def of(
        cls,
        named: Iterable[tuple[str, nn.Parameter]],
        P: int,
        K: int,
        bucket_bytes: float,
        moments: Mapping[str, Collection[nn.Parameter]] | None = None,
        numbers: Mapping[str, Collection[nn.Parameter]] | None = None,
        buffers: Iterable[Tensor] = (),
        ranks_per_host: int | None = None,
        whole: Collection[nn.Parameter] = frozenset(),
        units: Sequence[Collection[nn.Parameter]] = (),
    ) -> ModelLayout:
        """Of trainable parameters, which may be on the meta device, as the engine would lay them out: those
        that are to stay `whole` each in one chunk. `moments`, `numbers`: the parameters that have them.
        `units`: all parameters, frozen ones too, as torch gathers them where it shards them."""
        found, params = list[BucketLayout](), list[nn.Parameter]()
        lie = _by_rows(named, K, bucket_bytes) if units else _by_elements(named, K, bucket_bytes, whole)
        for some, size, undivided in lie:
            found.append(BucketLayout(num_reals(some), size, some[0].dtype.to_real().itemsize, undivided))
            params += some
        order = {p: i for i, p in enumerate(params)}
        by_dtype = Counter[torch.dtype]()
        for x in buffers:
            by_dtype[x.dtype] += x.nbytes
        return cls(
            P=P,
            K=K,
            buckets=tuple(found),
            layers=tuple(num_reals([p]) for p in params),
            optimizer_state={name: {order[p] for p in who} for name, who in (moments or {}).items()},
            numbers={name: {order[p] for p in who} for name, who in (numbers or {}).items()},
            buffers=tuple(by_dtype.values()),
            ranks_per_host=ranks_per_host,
            units=units_of(units, K),
            having=tuple(positions(p, K) for p in params) if units else (),
        )

    @property
    def sharded(self) -> bool:
        """Whether torch shards the model over the group."""
        return bool(self.units)

    @property
    def N(self) -> int:
        return self.P * self.K

    @property
    def M(self) -> int:
        return sum(b.used for b in self.buckets)

    @property
    def groups_per_host(self) -> int:
        """1 also where a group needs several."""
        return max((self.ranks_per_host or self.K) // self.K, 1)

    @property
    def hosts_of_a_group(self) -> list[int]:
        """Of each of its ranks, as they are counted in the first group."""
        return [j // (self.ranks_per_host or self.K) for j in range(self.K)]

    def ranks(self, over: Over) -> int:
        return {"group": self.K, "cross": self.P, "world": self.N, "peers": self.P}[over]

    def shard(self, b: BucketLayout) -> int:
        """Elements of a position's part of a bucket."""
        return b.padded // self.K

    def filled(self, b: BucketLayout) -> list[int]:
        """Elements of each position's part of a bucket, without padding; about so many where tensors or rows
        are not cut."""
        K, n = self.K, self.shard(b)
        if b.whole or self.sharded:
            return [b.used * (j + 1) // K - b.used * j // K for j in range(K)]
        return [min(max(b.used - j * n, 0), n) for j in range(K)]

    def here(self, b: BucketLayout) -> int:
        """Bytes of a bucket on a rank: of all of it, but for a model that torch shards."""
        return self.shard(b) * b.width if self.sharded else b.nbytes

    def own_elements(self, *, wide: bool = False) -> int:
        """Bytes of all chunks of a position, as wide as they are or as sums of them are made."""
        return sum(self.shard(b) * (b.wide if wide else b.width) for b in self.buckets)

    def rows_of(self, layers: Collection[int]) -> float:
        """Parts of these layers that a position owns, on the mean over the K."""
        counts = self.having or [
            1 if b.whole else (stop - 1) // self.shard(b) - start // self.shard(b) + 1
            for b, start, stop in self._places()
        ]
        return sum(counts[i] for i in layers) / self.K

    def by_width(self, layers: Collection[int]) -> Mapping[int, int]:
        """Elements of these layers, by the bytes that one has."""
        found = Counter[int]()
        for i, (b, start, stop) in enumerate(self._places()):
            if i in layers:
                found[b.width] += stop - start
        return found

    def message_buffer(self, parts: int = 1) -> float:
        """Bytes of a `Parcel` with this position's chunks, or with one of so many `parts` of them, on the
        mean over these."""
        total = 0
        for b in self.buckets:
            size, longer = divmod(self.shard(b), parts)
            total += longer * _aligned((size + 1) * b.width) + (parts - longer) * _aligned(size * b.width)
        return 8 + total / parts

    def _places(self) -> Iterator[tuple[BucketLayout, int, int]]:
        """Of each layer the bucket, and where in it the layer lies if none is dealt."""
        layers = iter(self.layers)
        for b in self.buckets:
            start = 0
            while start < b.used:
                stop = start + next(layers)
                yield b, start, stop
                start = stop


def param_gathers(m: ModelLayout) -> list[CommOp]:
    """What makes one model of the positions' chunks: T2 of eq. 8 of the hierarchical local SGD paper."""
    if m.K == 1 or m.sharded:
        return []
    return [CommOp("allgather", "group", b.nbytes, "parameters") for b in m.buckets]


def allreduce(over: Over, nbytes: float, phase: str = "") -> CommOp:
    return CommOp("allreduce", over, nbytes, phase)


def overlapped(x: CommOp, steps: int) -> CommOp:
    """It, on its way while so many steps are computed; what came of it is taken in when all is there."""
    return replace(x, overlap_steps=steps, bucket=None)


def _by_elements(
    named: Iterable[tuple[str, nn.Parameter]], K: int, bucket_bytes: float, whole: Collection[nn.Parameter]
) -> Iterator[tuple[list[nn.Parameter], int, bool]]:
    """Of each bucket the parameters, its elements with padding, and whether no chunk cuts a parameter."""
    for x in cut(named, K, bucket_bytes, whole):
        yield [slot.param for slot in x.slots], x.size, x.whole


def _by_rows(
    named: Iterable[tuple[str, nn.Parameter]], K: int, bucket_bytes: float
) -> Iterator[tuple[list[nn.Parameter], int, bool]]:
    """Likewise, of all positions together."""
    for bucket in in_buckets(named, K, bucket_bytes):
        params = [x.param for x in bucket]
        yield params, sum(K * padded(p, K) for p in params), False


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 8) * 8
