"""Two bytes an element: floats of 16 bits, to the nearest even."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hpcsgd.arguments import checked
from hpcsgd.parts.quantizers.base import Quantizer


@dataclass(frozen=True)
class Halves:
    """Elements as floats of a `dtype` of 16 bits. What they lose, half an ulp, is not kept."""

    dtype: torch.dtype
    keeps = False

    def nbytes(self, n: int) -> int:
        return (n + 1) // 2 * 4

    def encode(self, x: Tensor, code: Tensor, dice: int) -> None:
        code.view(self.dtype)[: x.numel()].copy_(x)

    def decode(self, code: Tensor, out: Tensor) -> None:
        out.copy_(code.view(self.dtype)[: out.numel()])


@checked
def bf16() -> Quantizer:
    """Two bytes an element, bfloat16: 8 bits of it, whatever its size; NaN and infinity as they are.

    Not to be confused with ``precision = "bf16_master"``, whose parameters are bfloat16 themselves.

    Example:
        >>> grad_reduce = hpcsgd.Quantized(gradients=hpcsgd.quantizers.bf16())
        >>> method = hpcsgd.hierarchical(sync_every=8, grad_reduce=grad_reduce)
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> train(optimizer, steps=2)
        >>> round(topology.world.stats.totals()["gradients"].bytes)     # AllToAll's would be 272
        136

    Source:
        D. Kalamkar et al.: A Study of BFLOAT16 for Deep Learning Training, 2019 (arXiv:1905.12322).
    """
    return Halves(torch.bfloat16)


@checked
def fp16() -> Quantizer:
    """Two bytes an element, float16: 11 bits of it between 6·10⁻⁵ and 65504; beyond that it is infinite,
    below 6·10⁻⁸ zero.

    Not to be confused with `bf16`, whose numbers are coarser and as large as float32's.

    Example:
        >>> grad_reduce = hpcsgd.Quantized(gradients=hpcsgd.quantizers.fp16())
        >>> method = hpcsgd.hierarchical(sync_every=8, grad_reduce=grad_reduce)
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)

    Source:
        P. Micikevicius et al.: Mixed Precision Training, ICLR 2018.
    """
    return Halves(torch.float16)
