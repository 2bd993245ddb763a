"""Models that torch shards by rows (`fully_shard`), told beforehand: what lies in the buckets of a position,
and what torch gathers as one.

Each parameter is cut along dimension 0 into K equal parts, of which the last ones may be shorter, or empty:
they are padded to the first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hpcsgd.comm import accumulation_dtype
from hpcsgd.core.elements import require_real
from hpcsgd.core.layout import Entry


@dataclass(frozen=True)
class Unit:
    """Parameters that torch gathers together, as those of one block: bytes of all positions, padding
    included."""

    weights: int
    gradients: int
    """Of those that are trained; 16-bit ones are added up in float32."""
    numel: int
    stays: bool = False
    """Whether it is whole from its forward pass to its backward pass: what is outside the blocks."""

    @classmethod
    def of(cls, params: Collection[nn.Parameter], K: int, *, stays: bool) -> Unit:
        weights = sum(K * padded(p, K) * p.element_size() for p in params)
        trained = [p for p in params if p.requires_grad]
        gradients = sum(K * padded(p, K) * accumulation_dtype(p.dtype).itemsize for p in trained)
        return cls(weights, gradients, sum(p.numel() for p in params), stays)


def units_of(units: Sequence[Collection[nn.Parameter]], K: int) -> tuple[Unit, ...]:
    """In the order of the backward pass, the model's own last; torch has nothing to do for one without
    parameters."""
    last = len(units) - 1
    return tuple(Unit.of(params, K, stays=i == last) for i, params in enumerate(units) if params)


def padded(param: nn.Parameter, K: int) -> int:
    """Elements of it on each of K positions."""
    return rows(param, K) * (param.numel() // max(param.shape[0], 1))


def rows(param: nn.Parameter, K: int) -> int:
    """Of it on position 0, which has the most."""
    return -(-param.shape[0] // K)


def positions(param: nn.Parameter, K: int) -> int:
    """How many of K have some of it."""
    return -(-param.shape[0] // rows(param, K))


def in_buckets(
    named: Iterable[tuple[str, nn.Parameter]],
    K: int,
    bucket_bytes: float,
    pinned: Callable[[nn.Parameter], bool] = lambda _: False,
) -> list[list[Entry]]:
    """What each bucket is of, in the order in which they become ready. Each is of one dtype and device, in
    memory that is `pinned` or not, and ends once it reaches `bucket_bytes`, over all positions."""
    found: dict[tuple[torch.dtype, torch.device, bool], list[list[Entry]]] = {}
    for number, (name, param) in reversed(list(enumerate(named))):
        if param.numel() == 0:
            continue
        require_real(name, param)
        of_kind = found.setdefault((param.dtype, param.device, pinned(param)), [[]])
        of_kind[-1].append(Entry(number, name, param))
        if sum(K * padded(x.param, K) for x in of_kind[-1]) * param.element_size() >= bucket_bytes:
            of_kind.append([])
    filled = [bucket for of_kind in found.values() for bucket in of_kind if bucket]
    return sorted(filled, key=lambda bucket: -bucket[-1].number)
