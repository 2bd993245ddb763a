"""Dense gradient reductions: the K gradients of a group become their mean.

This is steps one and two of hierarchical local SGD (S. Lee et al., IEEE Big Data 2020, section III-B).
`AllToAll` is the reduction of this paper. `ReduceScatter` sends the same number of bytes in other messages.
`Dense` chooses between the two by where the ranks of a group run. `AllReduce` is the baseline of the paper.
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
    """The base class of dense gradient reductions inside a group."""

    traits = GradReduceTraits(leaves_shards=True, per_bucket=True, keeps_gradients=False)

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
    """Gradient reduction with an all-to-all and a mean in rank order.

    The sum has a fixed order, so the bits do not depend on the MPI library.

    Shape:
        M parameters in total. A rank sends (K−1)/K·M elements per step. It keeps the K ranks' versions of its
        gradient shard, M elements.

    Example:
        >>> method = hpcsgd.hierarchical(sync_every=8, grad_reduce=hpcsgd.AllToAll())
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> train(optimizer, steps=2)
        >>> round(topology.world.stats.totals()["grad_reduce"].bytes)     # 68 / 2 elements of 4 bytes, twice
        272

    References:
        S. Lee et al., IEEE Big Data 2020, section III-B, steps one and two.

    See Also:
        `ReduceScatter`: leaves the sum to the library, and keeps one shard.
        `Dense`: chooses between the two.
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
        """Yield the all-to-alls of a step, one for each bucket of the model `m`.

        S. Lee et al. (IEEE Big Data 2020) call the time of an all-to-all of the whole model T0, in eq. 6.
        """
        for x, b in zip(_of_buckets("alltoall", m), m.buckets, strict=True):
            yield replace(x, reduced=b.padded)


@checked
@dataclass(frozen=True)
class ReduceScatter(InGroup):
    """Gradient reduction with the library's reduce-scatter.

    The order of the sum, and so its last bits, depend on the library.

    Shape:
        M parameters in total. A rank sends (K−1)/K·M elements per step. It keeps one gradient shard, M/K
        elements. If the group's ranks are on several nodes, each node first adds up the gradients of its
        ranks. That needs memory for another bucket.

    Example:
        >>> method = hpcsgd.hierarchical(sync_every=8, grad_reduce=hpcsgd.ReduceScatter())
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> train(optimizer, steps=2)
        >>> round(topology.world.stats.totals()["grad_reduce"].bytes)     # 68 / 2 elements of 4 bytes, twice
        272

    References:
        S. Lee et al., IEEE Big Data 2020, section III-B, steps one and two, with other messages.

    See Also:
        `AllToAll`: sends the same bytes in other messages, and keeps K shards.
        `Dense`: chooses between the two.
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
        """Return the reduce-scatters of a step, one for each bucket. All-to-alls would send as much."""
        return _of_buckets("reduce_scatter", m)


_TO_ALL, _BY_NODE = AllToAll(), ReduceScatter()
"""What `Dense` chooses from in every bucket of every step."""


@checked
@dataclass(frozen=True)
class Dense(InGroup):
    """Gradient reduction by `AllToAll` or `ReduceScatter`, chosen by where the ranks run.

    It uses `ReduceScatter` if a group has several nodes with several ranks on each, otherwise `AllToAll`. On
    such nodes an all-to-all would send the gradients of all ranks of a node over its link, and a
    reduce-scatter sends only their sum. 16-bit gradients always use `AllToAll`, since their sum would be
    rounded twice. The two add in different orders, so the last bits depend on the choice.

    Shape:
        M parameters in total. A rank sends (K−1)/K·M elements per step.

    Example:
        >>> method = hpcsgd.hierarchical(sync_every=8, grad_reduce=hpcsgd.Dense())     # the default
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> train(optimizer, steps=2)
        >>> round(topology.world.stats.totals()["grad_reduce"].bytes)     # 68 / 2 elements of 4 bytes, twice
        272

    References:
        S. Lee et al., IEEE Big Data 2020, section III-B, steps one and two; the choice is ours.

    See Also:
        `Sparse`: sends a part of the elements.
    """

    def __call__(self, d: ReduceContext, b: Bucket) -> None:
        by_node = d.topology.shares_nodes and accumulation_dtype(b.g.dtype) == b.g.dtype
        (_BY_NODE if by_node else _TO_ALL)(d, b)

    def memory_bytes(self, m: ModelLayout) -> float:
        room = (m.shard(b) * b.width * (1 if _goes_by_node(b, m) else m.K) for b in m.buckets)
        return sum(room) if m.K > 1 else 0

    def comm_ops(self, m: ModelLayout) -> Iterator[CommOp]:
        """Yield the operations of a step: an all-to-all or a reduce-scatter for each bucket."""
        for to_all, scattered, b in zip(_TO_ALL.comm_ops(m), _BY_NODE.comm_ops(m), m.buckets, strict=True):
            yield scattered if _goes_by_node(b, m) else to_all


def _goes_by_node(b: BucketLayout, m: ModelLayout) -> bool:
    return levels(m.hosts_of_a_group) is not None and b.wide == b.width


@dataclass(frozen=True)
class AllReduce(InGroup):
    """Gradient reduction with an allreduce: every rank gets the whole mean gradient of the group.

    A rank sends 2·(K−1)/K·M elements per step.
    """

    traits = replace(InGroup.traits, leaves_shards=False)

    def __call__(self, d: ReduceContext, b: Bucket) -> None:
        if self.idle(d.topology):
            return
        d.topology.intra_group.allreduce(b.g, "mean").wait()

    def comm_ops(self, m: ModelLayout) -> Iterator[CommOp]:
        """Return the allreduces of a step, one for each bucket of the model `m`.

        The time of an allreduce of the whole model is the first term of eq. 5 of S. Lee et al. (IEEE Big Data
        2020).
        """
        return _of_buckets("allreduce", m)


@checked
@dataclass(frozen=True)
class AcrossGroups:
    """The reduction `inner`, then the mean of the gradient shard over the groups.

    A rank sends 2·(P−1)/P·M/K elements more than with `inner` alone. With one group per host, each rank sends
    about M/K elements over the slow links. In an all-to-all over all ranks it would send about M elements.
    While a bucket is averaged over the groups, the next one is reduced in its group.
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
            d.topology.inter_group.allreduce(b.grad_shard if self.traits.leaves_shards else b.g, "mean")
            if d.topology.num_groups > 1
            else None
        )

    def comm_ops(self, m: ModelLayout) -> Iterator[CommOp]:
        yield from comm_ops(self.inner, m)
        parts = m.K if self.traits.leaves_shards else 1
        for i, b in enumerate(m.buckets):
            yield CommOp("allreduce", "inter_group", b.nbytes / parts, bucket=i)


@checked
@dataclass(frozen=True)
class WithAllgather:
    """The reduction `inner`, then an allgather that gives every rank the whole averaged gradient.

    A rank sends (K−1)/K·M elements more than with `inner` alone. This reduction is for optimizers whose
    update of a tensor depends on other tensors, so that every rank does the whole update.
    """

    inner: GradReduce
    traits: GradReduceTraits = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "traits", replace(self.inner.traits, leaves_shards=False))

    def idle(self, topology: Topology) -> bool:
        return self.inner.idle(topology)

    def __call__(self, d: ReduceContext, b: Bucket) -> None:
        complete(self.inner, d, b)
        if d.topology.group_size > 1:
            d.topology.intra_group.allgather(b.g, b.grad_shard).wait()

    def comm_ops(self, m: ModelLayout) -> Iterator[CommOp]:
        yield from comm_ops(self.inner, m)
        yield from _of_buckets("allgather", m)


def complete(grad_reduce: GradReduce, d: ReduceContext, b: Bucket) -> None:
    """Run the reduction `grad_reduce` and wait for its result, also if it returns `Work`."""
    under_way = grad_reduce(d, b)
    if under_way is not None:
        under_way.wait()


def _room(b: Bucket, like: Tensor) -> Tensor:
    """Return the bucket's receive buffer, or a new one if its buffer does not have the shape of `like`."""
    if b.received is None or b.received.shape != like.shape:
        b.received = torch.empty_like(like)
    return b.received


def _of_buckets(operation: str, m: ModelLayout) -> Iterator[CommOp]:
    """Yield `operation` over the ranks of a group, once for each bucket of the model `m`."""
    for i, b in enumerate(m.buckets):
        yield CommOp(operation, "intra_group", b.nbytes, bucket=i)
