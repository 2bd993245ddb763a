"""The predicted layout of FSDP models: each rank's buckets, and the units that torch gathers.

Each parameter is cut along dimension 0 into K equal parts, of which the last ones may be shorter or empty.
They are padded to the length of the first.
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
    """Parameters that torch gathers together, such as those of one block.

    Bytes are those of all ranks of a group together, padding included.
    """

    weights: int
    """Bytes of the parameters."""
    gradients: int
    """Bytes of the gradients of trained parameters; 16-bit ones are summed in float32."""
    numel: int
    stays: bool = False
    """True if the unit stays gathered from its forward pass to its backward pass, as that of the parameters
    outside blocks does."""

    @classmethod
    def of(cls, params: Collection[nn.Parameter], K: int, *, stays: bool) -> Unit:
        weights = sum(K * padded(p, K) * p.element_size() for p in params)
        trained = [p for p in params if p.requires_grad]
        gradients = sum(K * padded(p, K) * accumulation_dtype(p.dtype).itemsize for p in trained)
        return cls(weights, gradients, sum(p.numel() for p in params), stays)


def units_of(units: Sequence[Collection[nn.Parameter]], K: int) -> tuple[Unit, ...]:
    """Return the units in the order of the backward pass; the last one has the parameters outside blocks.

    A unit without parameters is left out: torch has nothing to do for it.
    """
    last = len(units) - 1
    return tuple(Unit.of(params, K, stays=i == last) for i, params in enumerate(units) if params)


def padded(param: nn.Parameter, K: int) -> int:
    """Return the number of elements of `param` on each of K ranks, padding included."""
    return rows(param, K) * (param.numel() // max(param.shape[0], 1))


def rows(param: nn.Parameter, K: int) -> int:
    """Return the number of rows of `param` on rank 0 of a group of K, which has the most."""
    return -(-param.shape[0] // K)


def positions(param: nn.Parameter, K: int) -> int:
    """Return how many of K ranks hold rows of `param`."""
    return -(-param.shape[0] // rows(param, K))


def in_buckets(
    named: Iterable[tuple[str, nn.Parameter]],
    K: int,
    bucket_bytes: float,
    pinned: Callable[[nn.Parameter], bool] = lambda _: False,
) -> list[list[Entry]]:
    """Return the contents of each bucket, in the order in which they become ready.

    The parameters of a bucket have one dtype and device, and are all `pinned` or all not. A bucket ends once
    it has `bucket_bytes` bytes on all ranks of a group together.
    """
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
