"""Quantizers to two bytes per element: 16-bit floats, rounded to the nearest even."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hpcsgd.arguments import checked
from hpcsgd.parts.quantizers.base import Quantizer


@dataclass(frozen=True)
class Halves:
    """The format of 16-bit floats of `dtype`. The rounding error, up to half an ulp, is not kept."""

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
    """Return a quantizer to two bytes per element: bfloat16.

    It keeps 8 significant bits at any magnitude. NaN and infinity are kept. The parameters themselves keep
    their dtype, unlike with ``precision = "bf16_master"``.

    Returns:
        A `Quantizer` for arguments such as `quantize`.

    Example:
        >>> grad_reduce = hpcsgd.Quantized(gradients=hpcsgd.quantizers.bf16())
        >>> method = hpcsgd.hierarchical(sync_every=8, grad_reduce=grad_reduce)
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> train(optimizer, steps=2)
        >>> round(topology.world.stats.totals()["grad_reduce"].bytes)     # AllToAll's would be 272
        136

    References:
        D. Kalamkar et al.: A Study of BFLOAT16 for Deep Learning Training, 2019 (arXiv:1905.12322).

    See Also:
        `fp16`: finer, in a smaller range.
    """
    return Halves(torch.bfloat16)


@checked
def fp16() -> Quantizer:
    """Return a quantizer to two bytes per element: float16.

    It keeps 11 significant bits between 6·10⁻⁵ and 65504. Larger numbers become infinite, and numbers below
    6·10⁻⁸ become zero.

    Returns:
        A `Quantizer` for arguments such as `quantize`.

    Example:
        >>> grad_reduce = hpcsgd.Quantized(gradients=hpcsgd.quantizers.fp16())
        >>> method = hpcsgd.hierarchical(sync_every=8, grad_reduce=grad_reduce)
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)

    References:
        P. Micikevicius et al.: Mixed Precision Training, ICLR 2018.

    See Also:
        `bf16`: coarser, with the range of float32.
    """
    return Halves(torch.float16)
