"""How many elements of each block of its shards a rank sends at a synchronization of `sparseloco`.

A block is consecutive elements, of which a rank sends k. In all groups, the ranks with the same shard index
have the same blocks and k, and agree on k before they send. So they know the length of each other's messages.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from hpcsgd.arguments import checked
from hpcsgd.comm import phase
from hpcsgd.core.norm import as_vector, squared_norm
from hpcsgd.core.topology import Topology
from hpcsgd.core.traffic import FLOAT64, CommOp, ModelLayout, allreduce
from hpcsgd.errors import UserError
from hpcsgd.parts.sparsifiers.base import Share, wanted
from hpcsgd.parts.sparsifiers.deft import assign

ALLOCATION = "allocation"
"""The phase of the messages by which ranks agree on k."""


@runtime_checkable
class Selection(Protocol):
    """A rule that says how many elements of each block a rank sends."""

    def shares(self, e: Sequence[Tensor], density: float, topology: Topology) -> list[Share]:
        """Return, for each vector in `e`, its blocks and how many elements of each are sent.

        `e` is the error feedback of this rank's shards, and `density` the fraction of elements to send. The
        result is the same in all groups. Collective in the group and across groups.
        """
        ...

    def expected(self, n: int, density: float) -> Share:
        """Return the blocks of a vector of n elements, and how many elements each is expected to send."""
        ...

    def comm_ops(self, m: ModelLayout) -> Iterable[CommOp]:
        """Return the operations by which ranks agree on how many elements of each block they send."""
        ...


@checked
@dataclass(frozen=True)
class PerBlock:
    """Selection of the same number of elements from every block of `size` elements of a rank's shards.

    A block is `size` consecutive elements. From each, k = density · size elements are sent, rounded, at least
    1. The ranks need not agree on k. Use it as `selection` of `sparseloco`; it is the default.

    Args:
        size: Elements of a block, of which k are sent. The last block of a shard may be shorter. Default
            4096, the paper's.

    Raises:
        UserError: If `size` is below 1.

    Example:
        >>> hpcsgd.sparseloco(sync_every=30, selection=hpcsgd.PerBlock(size=1024)).schedule
        Every(I=30)

    References:
        A. Sarfi et al.: Communication Efficient LLM Pre-training with SparseLoCo, 2025 (arXiv:2508.15706).

    See Also:
        `AcrossShards`: sends more from blocks with larger error feedback.
        `TopK`: selects elements of gradients.
    """

    size: int = 4096

    def __post_init__(self) -> None:
        _require_run("size", self.size)

    def shares(self, e: Sequence[Tensor], density: float, topology: Topology) -> list[Share]:
        return [self.expected(x.numel(), density) for x in e]

    def expected(self, n: int, density: float) -> Share:
        return _evenly(n, self.size, density)

    def comm_ops(self, m: ModelLayout) -> Iterable[CommOp]:
        return ()


@checked
@dataclass(frozen=True)
class AcrossShards:
    """Selection of the same total as with `PerBlock`, with more from blocks of larger error feedback.

    The blocks of all K ranks of a group share the total k in proportion to their norms over all groups, as
    DEFT divides k over layers. Use it as `selection` of `sparseloco`.

    Args:
        block: Consecutive elements of a rank's shards that share a k. The last block of a shard may be
            shorter. Default 65536.

    Raises:
        UserError: If `block` is below 1.

    Shape:
        At a synchronization, 8 bytes per block are sent across groups, and 16 bytes per block inside a group.

    Example:
        >>> method = hpcsgd.sparseloco(sync_every=2, density=0.1, selection=hpcsgd.AcrossShards(block=16))
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> train(optimizer, steps=2)
        >>> topology.world.stats.totals()["allocation"].bytes > 0
        True

    References:
        D. Yoon, S. Oh: DEFT: Exploiting Gradient Norm Difference between Model Layers for Scalable Gradient
        Sparsification, ICPP 2023, algorithm 3, for blocks in place of layers.

    See Also:
        `PerBlock`: the paper's selection.
        `Deft`: selects elements of gradients.
    """

    block: int = 65536

    def __post_init__(self) -> None:
        _require_run("block", self.block)

    def shares(self, e: Sequence[Tensor], density: float, topology: Topology) -> list[Share]:
        runs = [part for x in e for part in x.split(self.block) if x.numel()]
        with phase(ALLOCATION):
            norms, sizes, mine = _of_all(runs, e[0].device, topology)
        by = norms if any(norms) else [float(n) for n in sizes]  # evenly if all norms are zero
        k = assign(by, sizes, wanted(density, sum(sizes)))[mine]
        counts, shares = iter(k), []
        for x in e:
            bounds = [*range(0, x.numel(), self.block), x.numel()]
            spans = list(itertools.pairwise(bounds))
            shares.append(_share([(low, high, next(counts)) for low, high in spans]))
        return shares

    def expected(self, n: int, density: float) -> Share:
        """Return blocks that send equal parts of k: an approximation, because the real k depend on norms."""
        k = wanted(density, n) if n else 0
        spans = itertools.pairwise([*range(0, n, self.block), n])
        return _share([(low, high, k * high // n - k * low // n) for low, high in spans])

    def comm_ops(self, m: ModelLayout) -> Iterable[CommOp]:
        runs = sum(-(-m.shard(b) // self.block) for b in m.buckets)
        yield allreduce("inter_group", FLOAT64 * runs, ALLOCATION)
        yield CommOp("allgather", "intra_group", FLOAT64 * m.K, ALLOCATION)
        yield CommOp("allgather", "intra_group", 2 * FLOAT64 * runs * m.K, ALLOCATION)


def _of_all(
    runs: Sequence[Tensor], device: torch.device, topology: Topology
) -> tuple[list[float], list[int], slice]:
    """Return the norms (over all groups) and sizes of all blocks of the group, and which are this rank's.

    `runs` are the blocks of this rank's shards. Collective in the group and across groups.
    """
    norms = as_vector([squared_norm(run) for run in runs]) if runs else torch.zeros(0, dtype=torch.float64)
    norms = norms.to(device)
    if runs:
        topology.inter_group.allreduce(norms).wait()
    counts = torch.empty(topology.group_size, dtype=torch.float64, device=device)
    topology.intra_group.allgather(counts, counts.new_tensor([len(runs)])).wait()
    most = int(counts.max())
    mine = norms.new_zeros((most, 2))
    mine[: len(runs), 0] = norms.sqrt()
    mine[: len(runs), 1] = norms.new_tensor([float(run.numel()) for run in runs])
    rows = norms.new_empty((topology.group_size, most, 2))
    topology.intra_group.allgather(rows.view(-1), mine.view(-1)).wait()
    lengths = [int(count) for count in counts.tolist()]
    found = [pair for row, length in zip(rows.tolist(), lengths, strict=True) for pair in row[:length]]
    first = sum(lengths[: topology.shard_index])
    return [norm for norm, _ in found], [int(n) for _, n in found], slice(first, first + len(runs))


@functools.lru_cache(maxsize=1024)
def _evenly(n: int, size: int, density: float) -> Share:
    return _share(
        [(low, min(low + size, n), wanted(density, min(size, n - low))) for low in range(0, n, size)]
    )


def _share(segments: Sequence[tuple[int, int, int]]) -> Share:
    starts, stops, k = torch.tensor(segments, dtype=torch.int64, device="cpu").view(-1, 3).T.contiguous()
    return Share(starts, stops, k)


def _require_run(name: str, size: int) -> None:
    if type(size) is not int or size < 1:
        raise UserError(f"{name} = {size!r}: a number of elements, ≥ 1", key=name, value=size)


SELECTIONS: Mapping[str, Callable[..., Selection]] = {"across_shards": AcrossShards, "per_block": PerBlock}
"""The selections, by their names in job files."""
