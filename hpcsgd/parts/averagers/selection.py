"""Which elements of its chunks a position sends at a meeting: how many of each segment, alike in all groups.

Segments and their k are agreed on beforehand, so that the groups know how long each other's codes are.
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
"""What is sent to agree on k is counted so."""


@runtime_checkable
class Selection(Protocol):
    """How many elements of which segments a position sends."""

    def shares(self, e: Sequence[Tensor], density: float, topology: Topology) -> list[Share]:
        """Of each of these vectors, the same in all groups. Collective over group and cross."""
        ...

    def expected(self, n: int, density: float) -> Share:
        """Of a vector of n elements, on the mean."""
        ...

    def comm_ops(self, m: ModelLayout) -> Iterable[CommOp]:
        """What agreeing takes."""
        ...


@checked
@dataclass(frozen=True)
class PerBlock:
    """Of every `size` consecutive elements of a position's chunks as many: k = density · size, rounded, at
    least 1. Nothing has to be agreed on. For `selection`, and the default.

    Not to be confused with `AcrossShards`, which takes more where more has gathered, nor with `TopK`, which
    selects gradients.

    Args:
        size: elements of a run, of which k are sent; the last one of a chunk may be shorter. Default 4096,
            the paper's.

    Raises:
        UserError: for a `size` below 1.

    Example:
        >>> hpcsgd.sparseloco(sync_every=30, selection=hpcsgd.PerBlock(size=1024)).schedule
        Every(I=30)

    Source:
        A. Sarfi et al.: Communication Efficient LLM Pre-training with SparseLoCo, 2025 (arXiv:2508.15706).
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
    """As many elements in all, divided over the runs of all K positions by what has gathered there, as DEFT
    divides them over layers: k of a run in proportion to its norm over all groups. For `selection`.

    Costs 8 bytes a run across the groups and 16 inside a group at a meeting.

    Not to be confused with `PerBlock`, the paper's way, nor with `Deft`, which selects gradients.

    Args:
        block: consecutive elements of a position's chunks that share a k; the last one of a chunk may be
            shorter. Default 65536.

    Raises:
        UserError: for a `block` below 1.

    Example:
        >>> method = hpcsgd.sparseloco(sync_every=2, density=0.1, selection=hpcsgd.AcrossShards(block=16))
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> train(optimizer, steps=2)
        >>> topology.world.stats.totals()["allocation"].bytes > 0
        True

    Source:
        D. Yoon, S. Oh: DEFT: Exploiting Gradient Norm Difference between Model Layers for Scalable Gradient
        Sparsification, ICPP 2023, algorithm 3, over positions in place of workers.
    """

    block: int = 65536

    def __post_init__(self) -> None:
        _require_run("block", self.block)

    def shares(self, e: Sequence[Tensor], density: float, topology: Topology) -> list[Share]:
        runs = [part for x in e for part in x.split(self.block) if x.numel()]
        with phase(ALLOCATION):
            norms, sizes, mine = _of_all(runs, e[0].device, topology)
        by = norms if any(norms) else [float(n) for n in sizes]  # where nothing has gathered, evenly
        k = assign(by, sizes, wanted(density, sum(sizes)))[mine]
        counts, shares = iter(k), []
        for x in e:
            bounds = [*range(0, x.numel(), self.block), x.numel()]
            spans = list(itertools.pairwise(bounds))
            shares.append(_share([(low, high, next(counts)) for low, high in spans]))
        return shares

    def expected(self, n: int, density: float) -> Share:
        """About that: no k is known before there are norms."""
        k = wanted(density, n) if n else 0
        spans = itertools.pairwise([*range(0, n, self.block), n])
        return _share([(low, high, k * high // n - k * low // n) for low, high in spans])

    def comm_ops(self, m: ModelLayout) -> Iterable[CommOp]:
        runs = sum(-(-m.shard(b) // self.block) for b in m.buckets)
        yield allreduce("cross", FLOAT64 * runs, ALLOCATION)
        yield CommOp("allgather", "group", FLOAT64 * m.K, ALLOCATION)
        yield CommOp("allgather", "group", 2 * FLOAT64 * runs * m.K, ALLOCATION)


def _of_all(
    runs: Sequence[Tensor], device: torch.device, topology: Topology
) -> tuple[list[float], list[int], slice]:
    """Norms over all groups and sizes of the runs of all positions, and which of them are this one's."""
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
"""As job files call them."""
