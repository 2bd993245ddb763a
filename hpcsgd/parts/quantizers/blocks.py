"""Quantizers to 8, 4 or 2 bits per element: whole numbers in blocks, each with a scale."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hpcsgd import kernels
from hpcsgd.arguments import checked
from hpcsgd.errors import UserError
from hpcsgd.parts.quantizers.base import Quantizer, Rounding
from hpcsgd.parts.quantizers.rounding import Nearest


@dataclass(frozen=True)
class Blocks:
    """The format of `bits`-bit whole numbers with a float32 scale for every `block` numbers.

    `kernels.pack` describes it.
    """

    bits: int
    block: int
    rounding: Rounding

    def __post_init__(self) -> None:
        if self.block < 8 or self.block % 8:
            raise UserError(
                f"block = {self.block}: a multiple of 8 elements is expected", key="block", value=self.block
            )

    @property
    def keeps(self) -> bool:
        return not self.rounding.unbiased

    def nbytes(self, n: int) -> int:
        return -(-self._used(n) // 4) * 4

    def encode(self, x: Tensor, code: Tensor, dice: int) -> None:
        kernels.pack(x, code[: self._used(x.numel())], self.block, self.bits, self.rounding.draw(dice))

    def decode(self, code: Tensor, out: Tensor) -> None:
        kernels.unpack(code[: self._used(out.numel())], out, self.block, self.bits)

    def _used(self, n: int) -> int:
        return kernels.packed_bytes(n, self.block, self.bits)


@checked
def int8(block: int = 256, rounding: Rounding = Nearest()) -> Quantizer:  # noqa: B008 - frozen
    """Return a quantizer to one byte per element: whole numbers from −127 to 127 times a scale per block.

    The scale is the block's largest magnitude, divided by 127. A block with a NaN or an infinity is decoded
    as NaNs. All computation stays in floating point.

    Args:
        block: Elements that share a scale of 4 bytes; a multiple of 8. Default 256: 1.6 % more bytes.
        rounding: `Nearest()`, with error feedback, or `Stochastic()`. Default Nearest().

    Returns:
        A `Quantizer` for arguments such as `quantize`.

    Raises:
        UserError: If `block` is not a multiple of 8.

    Example:
        >>> method = hpcsgd.hierarchical(sync_every=8, quantize=hpcsgd.quantizers.int8())
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)

    References:
        T. Dettmers: 8-Bit Approximations for Parallelism in Deep Learning, ICLR 2016; in blocks as G. Wang et
        al.: ZeRO++, 2023 (arXiv:2306.10209).

    See Also:
        `int4`: half as many bytes.
    """
    return Blocks(8, block, rounding)


@checked
def int4(block: int = 64, rounding: Rounding = Nearest()) -> Quantizer:  # noqa: B008 - frozen
    """Return a quantizer to half a byte per element: whole numbers from −7 to 7 times a scale per block.

    The scale is the block's largest magnitude, divided by 7. A block with a NaN or an infinity is decoded as
    NaNs. The 4-bit floats of Streaming DiLoCo (E3M0) have the same number of bits, but no scale.

    Args:
        block: Elements that share a scale of 4 bytes; a multiple of 8. Default 64: 12.5 % more bytes.
        rounding: `Nearest()`, with error feedback, or `Stochastic()`. Default Nearest().

    Returns:
        A `Quantizer` for arguments such as `quantize`.

    Raises:
        UserError: If `block` is not a multiple of 8.

    Example:
        >>> method = hpcsgd.diloco(sync_every=50, quantize=hpcsgd.quantizers.int4())
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)

    References:
        G. Wang et al.: ZeRO++, 2023 (arXiv:2306.10209), gradients of 4 bits in blocks; A. Douillard et al.:
        Streaming DiLoCo, 2025 (arXiv:2501.18512), outer gradients of 4 bits.

    See Also:
        `int8`: twice as many bytes.
        `int2`: half as many bytes.
    """
    return Blocks(4, block, rounding)


@checked
def int2(block: int = 128) -> Quantizer:
    """Return a quantizer to a quarter of a byte per element: −2, −1, 0 or 1 times a scale per block.

    The scale is 1.4 times the block's mean magnitude. Its sign is such that the level −2, which has no
    positive counterpart, is on the same side of zero as the largest magnitude. The error is 14 % of the
    energy of normally distributed numbers; it is kept and sent later. Zeros stay zeros, such as rows of an
    embedding that no sample used. A block with a NaN or an infinity is decoded as NaNs.

    With a scale by the largest magnitude, as in `int4`, the error of 2 bits would be 18 %. Stochastic
    rounding is not possible, since it keeps no error and values beyond the last level would be cut off.

    Args:
        block: Elements that share a scale of 4 bytes; a multiple of 8. Default 128: 12.5 % more bytes.

    Returns:
        A `Quantizer` for arguments such as `quantize`.

    Raises:
        UserError: If `block` is not a multiple of 8.

    Example:
        >>> method = hpcsgd.diloco(sync_every=50, quantize=hpcsgd.quantizers.int2())
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)

    References:
        B. Thérien, X. Huang, I. Rish, E. Belilovsky: MuLoCo: Muon is a practical inner optimizer for DiLoCo,
        2025 (arXiv:2505.23725), deltas of 2 bits with error feedback; the levels are our own.

    See Also:
        `int4`: twice as many bytes.
    """
    return Blocks(2, block, Nearest())
