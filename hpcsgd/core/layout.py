"""Where in which bucket each parameter lies.

Buckets run backwards, so that they leave while the backward pass goes on. Parameters that an optimizer
updates element by element lie one behind the other, and chunks cut them anywhere. Those that it has to see
whole are dealt: each lies in one chunk, so that one position owns it, and chunks are padded to the longest of
the bucket. The costliest tensor goes first, to whoever has least to do so far (`balance.py`). A bucket of
such tensors grows until its chunks are about as long: as many equal layers as positions need no padding.
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
"""The part of a bucket of whole tensors that may be padding, where more tensors could make it less."""


@dataclass(frozen=True)
class Layout:
    """What one bucket is of."""

    slots: Sequence[Slot]
    """In the order in which they lie there."""
    size: int
    """In elements, padding included: a multiple of K."""
    whole: bool
    """Whether no chunk cuts a parameter."""
    pinned: bool = False
    """Whether it is to lie in page-locked memory of the host."""


class Entry(NamedTuple):
    """One parameter, before it has a place."""

    number: int
    """Its own among all, in the order of the forward pass."""
    name: str
    param: nn.Parameter


def nbytes(params: Iterable[nn.Parameter]) -> int:
    """Of all together."""
    return sum(p.numel() * p.element_size() for p in params)


def bucket_bytes(model_bytes: float, bucket_cap_mb: float | None = None) -> float:
    """Return the most bytes of a bucket: `bucket_cap_mb` MiB, or by default a sixteenth of the model, from
    1 to 4 MB.

    What leaves last has no backward pass to hide behind, so it is to be a small part; and every bucket costs
    messages. Measured by `benchmarks/step_time.py`.
    """
    return 2**20 * bucket_cap_mb if bucket_cap_mb is not None else min(max(model_bytes / 16, 1e6), 4e6)


def cut(
    named: Iterable[tuple[str, nn.Parameter]],
    K: int,
    bucket_bytes: float,
    whole: Collection[nn.Parameter] = frozenset(),
) -> list[Layout]:
    """What each bucket is of, in the order in which they become ready; `whole` are those that nobody cuts.

    Parameters come in the order of the forward pass. Each bucket is of one dtype and device, and ends once it
    reaches `bucket_bytes`, one of whole parameters once it is well filled besides. Raises `UserError` for a
    parameter without a dense layout.
    """
    runs: dict[tuple[torch.dtype, torch.device, bool], list[list[Entry]]] = {}
    filled: dict[object, int] = {}  # bytes of the last run of each kind
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
    """Which of so many tasks each of K workers gets, by their costs: longest processing time first."""
    hands = [list[int]() for _ in range(K)]
    for i, j in enumerate(largest_first(costs, K)):
        hands[j].append(i)
    return hands


def cost(shape: torch.Size) -> int:
    """What the update of a tensor takes, up to a factor: m·n·min(m, n) for a matrix of m × n, as each
    iteration of Newton and Schulz; one for each element of a vector."""
    numel = shape.numel()
    m = shape[0] if shape else 1
    return numel * min(m, numel // m)


def _well_filled(runs: list[list[Entry]], K: int) -> list[list[Entry]]:
    """The last one joined with those before it, until it is, too."""
    *others, last = runs
    while others and _too_empty(last, K):
        last = others.pop() + last
    return [*others, last]


def _too_empty(run: Sequence[Entry], K: int) -> bool:
    size = K * max(_numel(hand) for hand in _shares(run, K))
    return size - _numel(run) > EMPTY * size


def _side_by_side(run: Sequence[Entry], K: int) -> Layout:
    slots = list(_one_behind_the_other(run, 0))
    cuts = K * slots[0].reals  # chunks cut no complex number
    return Layout(slots, -(-slots[-1].stop // cuts) * cuts, whole=False)


def _assigned(run: Sequence[Entry], K: int) -> Layout:
    hands = _shares(run, K)
    chunk = max(map(_numel, hands))
    slots = [slot for j, hand in enumerate(hands) for slot in _one_behind_the_other(hand, j * chunk)]
    return Layout(slots, K * chunk, whole=True)


def _shares(run: Sequence[Entry], K: int) -> list[list[Entry]]:
    return [[run[i] for i in hand] for hand in assign([cost(x.param.shape) for x in run], K)]


def _one_behind_the_other(entries: Iterable[Entry], start: int) -> Iterator[Slot]:
    for x in entries:
        slot = Whole(x.name, x.param, start, x.number)
        yield slot
        start = slot.stop


def _numel(entries: Iterable[Entry]) -> int:
    return num_reals(x.param for x in entries)
