"""The place of each parameter in the buckets.

Buckets are in backward order, so that they can be sent while the backward pass goes on. Parameters that an
optimizer updates element by element lie one after the other, and shards cut them anywhere. Parameters that an
optimizer must see whole are assigned: each lies in one shard, so that one rank owns it. Shards are then
padded to the longest of the bucket. The costliest tensor is assigned first, to the rank with the least work
so far (`balance.py`). A bucket of whole tensors grows until its shards are about equally long. If there are
as many equal layers as ranks, no padding is needed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from hpcsgd.core.balance import largest_first
from hpcsgd.core.elements import num_reals, require_dense
from hpcsgd.core.slot import Slot, Whole

EMPTY = 1 / 16
"""The share of padding above which a bucket of whole tensors gets more tensors, if there are more."""


@dataclass(frozen=True)
class Layout:
    """The contents of one bucket."""

    slots: Sequence[Slot]
    """Slots of the parameters, in the order in which they lie in the bucket."""
    size: int
    """Number of elements, padding included; a multiple of K."""
    whole: bool
    """True if no shard cuts a parameter."""
    pinned: bool = False
    """True if the bucket is to be in page-locked host memory."""


class Entry(NamedTuple):
    """A parameter that has no place in a bucket yet."""

    number: int
    """Index among all parameters, in the order of the forward pass."""
    name: str
    param: nn.Parameter


def nbytes(params: Iterable[nn.Parameter]) -> int:
    """Return the bytes of all `params` together."""
    return sum(p.numel() * p.element_size() for p in params)


def bucket_bytes(model_bytes: float, bucket_cap_mb: float | None = None) -> float:
    """Return the number of bytes at which a bucket ends.

    This is `bucket_cap_mb` MiB, or by default 1/16 of the model, between 1 and 4 MB. The last bucket has no
    backward pass to overlap with, so it should be small; but each bucket costs messages. The default was
    measured with `benchmarks/step_time.py`.
    """
    return 2**20 * bucket_cap_mb if bucket_cap_mb is not None else min(max(model_bytes / 16, 1e6), 4e6)


def cut(
    named: Iterable[tuple[str, nn.Parameter]],
    K: int,
    bucket_bytes: float,
    whole: Collection[nn.Parameter] = frozenset(),
) -> list[Layout]:
    """Return the contents of each bucket, in the order in which they become ready.

    `named`: parameters in the order of the forward pass. `whole`: those that no shard may cut. Each bucket is
    of one dtype and device and ends once it has `bucket_bytes` bytes. A bucket of whole parameters ends only
    if at most `EMPTY` of it is padding. Raises `UserError` for a parameter without a dense layout.
    """
    runs: dict[tuple[torch.dtype, torch.device, bool], list[list[Entry]]] = {}
    filled: dict[object, int] = {}  # bytes of the last bucket of each kind
    for number, (name, param) in reversed(list(enumerate(named))):
        if param.numel() == 0:
            continue
        require_dense(name, param)
        kind = param.dtype, param.device, param in whole
        of_kind = runs.setdefault(kind, [[]])
        of_kind[-1].append(Entry(number, name, param))
        filled[kind] = filled.get(kind, 0) + nbytes([param])
        if filled[kind] >= bucket_bytes and not (param in whole and _too_empty(of_kind[-1], K)):
            of_kind.append([])
            filled[kind] = 0
    found: list[tuple[int, Layout]] = []
    for (_, _, undivided), of_kind in runs.items():
        some = [run for run in of_kind if run]
        some, laid = (_well_filled(some, K), _assigned) if undivided else (some, _side_by_side)
        found += [(run[-1].number, laid(run, K)) for run in some]
    return [layout for _, layout in sorted(found, key=lambda each: -each[0])]


def assign(costs: Sequence[float], K: int) -> list[list[int]]:
    """Return the indices of the tasks of each of K workers; the costliest task is assigned first."""
    shares = [list[int]() for _ in range(K)]
    for i, j in enumerate(largest_first(costs, K)):
        shares[j].append(i)
    return shares


def cost(shape: torch.Size) -> int:
    """Return the cost of updating a tensor, up to a factor.

    It is m·n·min(m, n) for a matrix of m × n, as in each Newton-Schulz iteration, and 1 per vector element.
    """
    numel = shape.numel()
    m = shape[0] if shape else 1
    return numel * min(m, numel // m)


def _well_filled(runs: list[list[Entry]], K: int) -> list[list[Entry]]:
    """Join the last bucket with the buckets before it until at most `EMPTY` of it is padding."""
    *others, last = runs
    while others and _too_empty(last, K):
        last = others.pop() + last
    return [*others, last]


def _too_empty(run: Sequence[Entry], K: int) -> bool:
    size = K * max(_numel(share) for share in _shares(run, K))
    return size - _numel(run) > EMPTY * size


def _side_by_side(run: Sequence[Entry], K: int) -> Layout:
    slots = list(_one_behind_the_other(run, 0))
    cuts = K * slots[0].reals  # so that no shard cuts a complex number
    return Layout(slots, -(-slots[-1].stop // cuts) * cuts, whole=False)


def _assigned(run: Sequence[Entry], K: int) -> Layout:
    shares = _shares(run, K)
    shard_size = max(map(_numel, shares))
    slots = [slot for j, share in enumerate(shares) for slot in _one_behind_the_other(share, j * shard_size)]
    return Layout(slots, K * shard_size, whole=True)


def _shares(run: Sequence[Entry], K: int) -> list[list[Entry]]:
    return [[run[i] for i in share] for share in assign([cost(x.param.shape) for x in run], K)]


def _one_behind_the_other(entries: Iterable[Entry], start: int) -> Iterator[Slot]:
    for x in entries:
        slot = Whole(x.name, x.param, start, x.number)
        yield slot
        start = slot.stop


def _numel(entries: Iterable[Entry]) -> int:
    return num_reals(x.param for x in entries)
