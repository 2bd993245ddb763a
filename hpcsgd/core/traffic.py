"""The predicted communication and memory of a method: the operations of a step and their bytes.

Parts of a method that send something have `comm_ops` (`hpcsgd.core.optional`), next to the code that sends
and in the terms of their paper. `hpcsgd.cost` combines the parts as the engine does and computes the time on
a machine. A test compares the predictions with what `CommStats` counted.
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
from hpcsgd.core.matrices import bytes_by_period
from hpcsgd.core.rows import Unit, in_buckets, padded, positions, units_of

Over = Literal["intra_group", "inter_group", "world", "replica_groups"]
"""The communicators of a `Topology`. "replica_groups" are other jobs; `CommStats` does not count bytes to
them."""
Stage = Literal["grad_reduce", "model_average", "gather", "forward", "backward", "reduce"]
"""The stages of a step. The last three are torch's for an FSDP model: it gathers weights for the forward and
the backward pass, and reduces gradients."""
FLOAT64 = 8
"""Bytes of a norm, a loss or a count."""


@dataclass(frozen=True)
class CommOp:
    """A predicted communication operation, in which every rank takes part."""

    operation: str
    """Name of the method of `Communicator`."""
    over: Over
    nbytes: float
    """Bytes of the operation's full vector, averaged over ranks. For an allgather: all that is gathered. For
    `sendrecv`: bytes sent to all peers together."""
    phase: str = ""
    """Phase under which `CommStats` counts the operation. "": the phase of the caller."""
    times: float = 1.0
    """Mean number of times per step or per synchronization."""
    bucket: int | None = None
    """Index of the bucket that is sent: the operation begins once that bucket is ready. None: it begins once
    all operations before it have ended. For FSDP's messages: index of the unit."""
    stage: Stage = "grad_reduce"
    """The stage of a step to which the operation belongs."""
    overlap_steps: int = 0
    """Number of following steps that are computed during the operation. 0: the step waits for it."""
    reduced: float = 0.0
    """Number of received elements that the rank then averages."""
    off_host_fraction: float = 1.0
    """For `sendrecv`: the share of the bytes that go to other hosts, if any do."""
    sender_fraction: float = 1.0
    """The share of the ranks that send. The others wait."""
    contention: float = 1.0
    """Mean factor by which the operation takes longer because several messages may reach one rank."""

    def within(self, phase: str, share: float = 1.0) -> CommOp:
        """Return this operation as part of a mean step of which only a `share` has it.

        If the operation has no phase, it gets `phase`.
        """
        return replace(self, phase=self.phase or phase, times=self.times * share)


@dataclass(frozen=True)
class BucketLayout:
    """The size of one bucket; `used` and `padded` are its elements without and with padding."""

    used: int
    padded: int
    width: int
    """Bytes of an element."""
    whole: bool = False
    """True if no shard cuts a parameter."""

    @property
    def nbytes(self) -> int:
        return self.padded * self.width

    @property
    def wide(self) -> int:
        """Bytes of an element while it is summed: at least 4, as 16-bit numbers are summed in float32."""
        return max(self.width, 4)


@dataclass(frozen=True)
class ModelLayout:
    """The values on which the bytes of a step depend: P groups of K, and the layout of the model."""

    P: int
    K: int
    buckets: tuple[BucketLayout, ...]
    layers: tuple[int, ...] = ()
    """Elements of each parameter, bucket by bucket."""
    optimizer_state: Mapping[str, Collection[int]] = field(default_factory=dict[str, Collection[int]])
    """For each name of an optimizer-state tensor that is shaped like its parameter: the indices in `layers`
    of the parameters that have such a tensor."""
    numbers: Mapping[str, Collection[int]] = field(default_factory=dict[str, Collection[int]])
    """The same for optimizer state that is one float32 per `ShardRange` of a parameter."""
    buffers: tuple[int, ...] = ()
    """Bytes of all float buffers of the model, one entry per dtype."""
    ranks_per_host: int | None = None
    """Number of ranks on each host. None: K."""
    units: tuple[Unit, ...] = ()
    """For an FSDP model: the units that torch gathers, in the order of the backward pass. Otherwise empty."""
    having: tuple[int, ...] = ()
    """For an FSDP model: for each of `layers`, the number of ranks in the group that hold rows of it."""
    orthogonalized: Mapping[int, float] = field(default_factory=dict[int, float])
    """For an FSDP model and Muon: by period, the mean bytes that a rank sends to bring the rows of all
    matrices together."""

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
        periods: Mapping[nn.Parameter, int] | None = None,
    ) -> ModelLayout:
        """Return the layout that the engine would make of trainable parameters, which may be on meta devices.

        `whole`: parameters that must each be in one shard. `moments`, `numbers`: by name of an optimizer
        state, the parameters that have one, as a tensor of their shape or as one number. `units`: all
        parameters, including frozen ones, as FSDP gathers them. `periods`: the matrices that Muon trains, and
        every how many steps it needs each whole.
        """
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
            orthogonalized=bytes_by_period({p: periods[p] for p in params if p in periods}, K)
            if units and periods
            else {},
        )

    @property
    def sharded(self) -> bool:
        """True for an FSDP model, which torch shards over the group."""
        return bool(self.units)

    @property
    def N(self) -> int:
        return self.P * self.K

    @property
    def M(self) -> int:
        return sum(b.used for b in self.buckets)

    @property
    def groups_per_host(self) -> int:
        """Number of groups on one host; 1 if a group needs several hosts."""
        return max((self.ranks_per_host or self.K) // self.K, 1)

    @property
    def hosts_of_a_group(self) -> list[int]:
        """The host of each rank of the first group."""
        return [j // (self.ranks_per_host or self.K) for j in range(self.K)]

    def ranks(self, over: Over) -> int:
        return {"intra_group": self.K, "inter_group": self.P, "world": self.N, "replica_groups": self.P}[over]

    def shard(self, b: BucketLayout) -> int:
        """Return the number of elements of one rank's shard of a bucket, padding included."""
        return b.padded // self.K

    def filled(self, b: BucketLayout) -> list[int]:
        """Return the number of elements of each rank's shard of a bucket, without padding.

        The result is approximate if shards do not cut tensors or rows.
        """
        K, n = self.K, self.shard(b)
        if b.whole or self.sharded:
            return [b.used * (j + 1) // K - b.used * j // K for j in range(K)]
        return [min(max(b.used - j * n, 0), n) for j in range(K)]

    def here(self, b: BucketLayout) -> int:
        """Return the bytes of a bucket on a rank: the whole bucket, or the rank's part of an FSDP model."""
        return self.shard(b) * b.width if self.sharded else b.nbytes

    def own_elements(self, *, wide: bool = False) -> int:
        """Return the bytes of all shards of a rank; `wide`: at least 4 bytes per element, as for sums."""
        return sum(self.shard(b) * (b.wide if wide else b.width) for b in self.buckets)

    def rows_of(self, layers: Collection[int]) -> float:
        """Return how many parts of the layers with these indices a rank owns: the mean over the K ranks."""
        counts = self.having or [
            1 if b.whole else (stop - 1) // self.shard(b) - start // self.shard(b) + 1
            for b, start, stop in self._places()
        ]
        return sum(counts[i] for i in layers) / self.K

    def by_width(self, layers: Collection[int]) -> Mapping[int, int]:
        """Return the number of elements of the layers with these indices, by the bytes of one element."""
        found = Counter[int]()
        for i, (b, start, stop) in enumerate(self._places()):
            if i in layers:
                found[b.width] += stop - start
        return found

    def message_buffer(self, parts: int = 1) -> float:
        """Return the bytes of a `MessageBuffer` with this rank's shards.

        With `parts` above 1, each shard is cut into that many parts, and the result is the mean bytes of a
        buffer with one part of each shard.
        """
        total = 0
        for b in self.buckets:
            size, longer = divmod(self.shard(b), parts)
            total += longer * _aligned((size + 1) * b.width) + (parts - longer) * _aligned(size * b.width)
        return 8 + total / parts

    def _places(self) -> Iterator[tuple[BucketLayout, int, int]]:
        """Yield each layer's bucket, and its start and stop there if layers lie one after the other."""
        layers = iter(self.layers)
        for b in self.buckets:
            start = 0
            while start < b.used:
                stop = start + next(layers)
                yield b, start, stop
                start = stop


def param_gathers(m: ModelLayout) -> list[CommOp]:
    """Return the allgathers of shards after a step: T2 of eq. 8 of the hierarchical local SGD paper."""
    if m.K == 1 or m.sharded:
        return []
    return [CommOp("allgather", "intra_group", b.nbytes, "param_gather") for b in m.buckets]


def allreduce(over: Over, nbytes: float, phase: str = "") -> CommOp:
    return CommOp("allreduce", over, nbytes, phase)


def overlapped(x: CommOp, steps: int) -> CommOp:
    """Return operation `x`, overlapped with the next `steps` steps; its whole result is used after them."""
    return replace(x, overlap_steps=steps, bucket=None)


def _by_elements(
    named: Iterable[tuple[str, nn.Parameter]], K: int, bucket_bytes: float, whole: Collection[nn.Parameter]
) -> Iterator[tuple[list[nn.Parameter], int, bool]]:
    """Yield each bucket's parameters, its elements with padding, and whether no shard cuts a parameter."""
    for x in cut(named, K, bucket_bytes, whole):
        yield [slot.param for slot in x.slots], x.size, x.whole


def _by_rows(
    named: Iterable[tuple[str, nn.Parameter]], K: int, bucket_bytes: float
) -> Iterator[tuple[list[nn.Parameter], int, bool]]:
    """Yield the same as `_by_elements` for an FSDP model; elements are those of all ranks of the group."""
    for bucket in in_buckets(named, K, bucket_bytes):
        params = [x.param for x in bucket]
        yield params, sum(K * padded(p, K) for p in params), False


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 8) * 8
