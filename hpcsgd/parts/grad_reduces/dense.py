"""Dense exchanges: the K gradients of a group become their mean.

The hierarchical local SGD paper, section III-B, steps one and two. `AllToAll` is the
paper's; `ReduceScatter` moves the same bytes in other messages; `Dense` is the one of both that fits where a
group is; `AllReduce` is the paper's baseline.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hpcsgd.arguments import checked
from hpcsgd.comm import Work, accumulation_dtype
from hpcsgd.comm.by_node import levels
from hpcsgd.core.flat import Bucket
from hpcsgd.core.optional import comm_ops
from hpcsgd.core.step import GradReduce, ReduceContext
from hpcsgd.core.topology import Topology
from hpcsgd.core.traffic import BucketLayout, CommOp, ModelLayout
from hpcsgd.core.traits import GradReduceTraits
from hpcsgd.parts.grad_reduces.by_torch import ByTorch, left_to_torch


class InGroup(ABC):
    """What dense exchanges of a group have in common."""

    traits = GradReduceTraits(shards=True, per_bucket=True, keeps_gradients=False)

    def across_groups(self) -> GradReduce:
        return AcrossGroups(self)

    def left_to_torch(self) -> GradReduce:
        return ByTorch()

    def idle(self, topology: Topology) -> bool:
        return topology.group_size == 1

    @abstractmethod
    def __call__(self, d: ReduceContext, b: Bucket) -> None: ...


@checked
@dataclass(frozen=True)
class AllToAll(InGroup):
    """The group's mean gradient, by an all-to-all and a mean in rank order: (K−1)/K·M elements sent a rank.

    The sum is ours, in the order of the ranks, and so the same bits whatever the MPI library. Takes room for
    the K versions of a gradient chunk, M elements.

    Not to be confused with `ReduceScatter`, which leaves the sum to the library and needs room for one chunk.

    Example:
        >>> method = hpcsgd.hierarchical(sync_every=8, grad_reduce=hpcsgd.AllToAll())
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> train(optimizer, steps=2)
        >>> round(topology.world.stats.totals()["gradients"].bytes)     # 68 / 2 elements of 4 bytes, twice
        272

    Source:
        S. Lee et al., IEEE Big Data 2020, section III-B, steps one and two.
    """

    def __call__(self, d: ReduceContext, b: Bucket) -> None:
        if self.idle(d.topology):
            return
        received = _room(b, b.g)
        d.topology.intra_group.alltoall(received, b.g).wait()
        torch.mean(received.view(d.topology.group_size, -1), 0, out=b.grad_shard)

    def memory_bytes(self, m: ModelLayout) -> float:
        return m.K * m.own_elements() if m.K > 1 else 0

    def comm_ops(self, m: ModelLayout) -> Iterator[CommOp]:
        """T0 of eq. 6."""
        for x, b in zip(_of_buckets("alltoall", m), m.buckets, strict=True):
            yield replace(x, reduced=b.padded)


@checked
@dataclass(frozen=True)
class ReduceScatter(InGroup):
    """The group's mean gradient, by the library's reduce-scatter: (K−1)/K·M elements sent a rank.

    Takes room for one gradient chunk, M/K elements, and over several nodes, whose ranks add up first, for the
    bucket under way. In which order the library adds is its own affair.

    Not to be confused with `AllToAll`, the same bytes in other messages, with room for K chunks.

    Example:
        >>> method = hpcsgd.hierarchical(sync_every=8, grad_reduce=hpcsgd.ReduceScatter())
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> train(optimizer, steps=2)
        >>> round(topology.world.stats.totals()["gradients"].bytes)     # 68 / 2 elements of 4 bytes, twice
        272

    Source:
        S. Lee et al., IEEE Big Data 2020, section III-B, steps one and two, with other messages.
    """

    def __call__(self, d: ReduceContext, b: Bucket) -> None:
        if self.idle(d.topology):
            return
        received = _room(b, b.grad_shard)
        d.topology.intra_group.reduce_scatter(received, b.g, "mean").wait()
        b.grad_shard.copy_(received)

    def memory_bytes(self, m: ModelLayout) -> float:
        return m.own_elements() if m.K > 1 else 0

    def comm_ops(self, m: ModelLayout) -> Iterator[CommOp]:
        """As much as T0 of eq. 6."""
        return _of_buckets("reduce_scatter", m)


@checked
@dataclass(frozen=True)
class Dense(InGroup):
    """The group's mean gradient: by `AllToAll`, but by `ReduceScatter` where a group has several nodes, with
    several ranks on each of them. (K−1)/K·M elements sent a rank either way.

    There an all-to-all sends the gradients of all ranks of a node over its link, and the reduce-scatter only
    their sum; not so of 16-bit ones, whose sum would be rounded twice. Which one it is follows from where the
    ranks are; so do the bits, as sums of another order.

    Not to be confused with `Sparse`, which sends a part of the gradient.

    Example:
        >>> method = hpcsgd.hierarchical(sync_every=8, grad_reduce=hpcsgd.Dense())     # as without saying so
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> train(optimizer, steps=2)
        >>> round(topology.world.stats.totals()["gradients"].bytes)     # 68 / 2 elements of 4 bytes, twice
        272

    Source:
        S. Lee et al., IEEE Big Data 2020, section III-B, steps one and two; the choice is ours.
    """

    def __call__(self, d: ReduceContext, b: Bucket) -> None:
        by_node = d.topology.shares_nodes and accumulation_dtype(b.g.dtype) == b.g.dtype
        (ReduceScatter if by_node else AllToAll)()(d, b)

    def memory_bytes(self, m: ModelLayout) -> float:
        room = (m.shard(b) * b.width * (1 if _goes_by_node(b, m) else m.K) for b in m.buckets)
        return sum(room) if m.K > 1 else 0

    def comm_ops(self, m: ModelLayout) -> Iterator[CommOp]:
        """T0 of eq. 6."""
        for to_all, scattered, b in zip(
            AllToAll().comm_ops(m), ReduceScatter().comm_ops(m), m.buckets, strict=True
        ):
            yield scattered if _goes_by_node(b, m) else to_all


def _goes_by_node(b: BucketLayout, m: ModelLayout) -> bool:
    return levels(m.hosts_of_a_group) is not None and b.wide == b.width


@dataclass(frozen=True)
class AllReduce(InGroup):
    """g = mean of the K gradients on every position, each of which updates all of w. 2·(K−1)/K·M sent."""

    traits = replace(InGroup.traits, shards=False)

    def __call__(self, d: ReduceContext, b: Bucket) -> None:
        if self.idle(d.topology):
            return
        d.topology.intra_group.allreduce(b.g, "mean").wait()

    def comm_ops(self, m: ModelLayout) -> Iterator[CommOp]:
        """The first term of eq. 5."""
        return _of_buckets("allreduce", m)


@checked
@dataclass(frozen=True)
class AcrossGroups:
    """`inner`, then the mean of the gradient chunk over the groups: 2·(P−1)/P·M/K more sent.

    With one group per host the slow links carry M/K a rank instead of the M of a flat all-to-all. A bucket is
    on them while the next one is in its group.
    """

    inner: GradReduce
    traits: GradReduceTraits = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "traits", replace(self.inner.traits, across=True))

    def left_to_torch(self) -> GradReduce:
        return AcrossGroups(left_to_torch(self.inner))

    def idle(self, topology: Topology) -> bool:
        return topology.num_groups == 1 and self.inner.idle(topology)

    def __call__(self, d: ReduceContext, b: Bucket) -> Work | None:
        complete(self.inner, d, b)
        return (
            d.topology.inter_group.allreduce(b.grad_shard if self.traits.shards else b.g, "mean")
            if d.topology.num_groups > 1
            else None
        )

    def comm_ops(self, m: ModelLayout) -> Iterator[CommOp]:
        yield from comm_ops(self.inner, m)
        parts = m.K if self.traits.shards else 1
        for i, b in enumerate(m.buckets):
            yield CommOp("allreduce", "cross", b.nbytes / parts, bucket=i)


@checked
@dataclass(frozen=True)
class WithAllgather:
    """`inner`, then all chunks of the averaged gradient to every position: (K−1)/K·M more sent.

    For optimizers that may look at more than one tensor: every position does the whole update.
    """

    inner: GradReduce
    traits: GradReduceTraits = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "traits", replace(self.inner.traits, shards=False))

    def idle(self, topology: Topology) -> bool:
        return self.inner.idle(topology)

    def __call__(self, d: ReduceContext, b: Bucket) -> None:
        complete(self.inner, d, b)
        if d.topology.group_size > 1:
            d.topology.intra_group.allgather(b.g, b.grad_shard).wait()

    def comm_ops(self, m: ModelLayout) -> Iterator[CommOp]:
        yield from comm_ops(self.inner, m)
        yield from _of_buckets("allgather", m)


def complete(exchange: GradReduce, d: ReduceContext, b: Bucket) -> None:
    """All of it, here and now: for what goes on with its result."""
    under_way = exchange(d, b)
    if under_way is not None:
        under_way.wait()


def _room(b: Bucket, like: Tensor) -> Tensor:
    """Return the bucket's room for what arrives; of another size after a change to another exchange."""
    if b.received is None or b.received.shape != like.shape:
        b.received = torch.empty_like(like)
    return b.received


def _of_buckets(operation: str, m: ModelLayout) -> Iterator[CommOp]:
    """Over the group, whole buckets as they become ready."""
    for i, b in enumerate(m.buckets):
        yield CommOp(operation, "group", b.nbytes, bucket=i)
