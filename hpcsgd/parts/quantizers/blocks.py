"""A byte, half a byte or a quarter of one an element: whole numbers in blocks that have a scale each."""

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
    """Numbers of so many `bits`, and for every `block` of them a float32: see `kernels.pack`."""

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
    """A byte an element: whole numbers from −127 to 127 times a scale that `block` elements share.

    The scale is the block's largest magnitude over 127. A block with a NaN or an infinity arrives as NaNs.

    Not to be confused with integer training: all that is computed stays float.

    Args:
        block: elements that share a scale, 4 bytes; a multiple of 8. Default 256: 1.6 % more bytes.
        rounding: `Nearest()`, with error feedback, or `Stochastic()`. Default Nearest().

    Raises:
        UserError: for a `block` that is no multiple of 8.

    Example:
        >>> method = hpcsgd.hierarchical(sync_every=8, quantize=hpcsgd.quantizers.int8())
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)

    Source:
        T. Dettmers: 8-Bit Approximations for Parallelism in Deep Learning, ICLR 2016; in blocks as G. Wang et
        al.: ZeRO++, 2023 (arXiv:2306.10209).
    """
    return Blocks(8, block, rounding)


@checked
def int4(block: int = 64, rounding: Rounding = Nearest()) -> Quantizer:  # noqa: B008 - frozen
    """Half a byte an element: whole numbers from −7 to 7 times a scale that `block` elements share.

    The scale is the block's largest magnitude over 7. A block with a NaN or an infinity arrives as NaNs.

    Not to be confused with the 4-bit floats of Streaming DiLoCo (E3M0): as many bits, but no scale there.

    Args:
        block: elements that share a scale, 4 bytes; a multiple of 8. Default 64: 12.5 % more bytes.
        rounding: `Nearest()`, with error feedback, or `Stochastic()`. Default Nearest().

    Raises:
        UserError: for a `block` that is no multiple of 8.

    Example:
        >>> method = hpcsgd.diloco(sync_every=50, quantize=hpcsgd.quantizers.int4())
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)

    Source:
        G. Wang et al.: ZeRO++, 2023 (arXiv:2306.10209), gradients of 4 bits in blocks; A. Douillard et al.:
        Streaming DiLoCo, 2025 (arXiv:2501.18512), outer gradients of 4 bits.
    """
    return Blocks(4, block, rounding)


@checked
def int2(block: int = 128) -> Quantizer:
    """A quarter of a byte an element: −2, −1, 0 or 1 times a scale that `block` elements share.

    The scale is 1.4 times the block's mean magnitude, with a sign: of the larger numbers on one side of
    zero four levels tell more than three, and −2 is for the side that has the largest. What is lost, 14 %
    of the energy of normal numbers, is sent later. Zeros stay zeros, as of rows of an embedding that nobody
    used. A block with a NaN or an infinity arrives as NaNs.

    Not to be confused with `int4`, whose scale goes by the largest: of 2 bits that would lose 18 %. It cannot
    round by chance, since what is beyond the last level would be lost for good.

    Args:
        block: elements that share a scale, 4 bytes; a multiple of 8. Default 128: 12.5 % more bytes.

    Raises:
        UserError: for a `block` that is no multiple of 8.

    Example:
        >>> method = hpcsgd.diloco(sync_every=50, quantize=hpcsgd.quantizers.int2())
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)

    Source:
        B. Thérien, X. Huang, I. Rish, E. Belilovsky: MuLoCo: Muon is a practical inner optimizer for
        DiLoCo, 2025 (arXiv:2505.23725), deltas of 2 bits with error feedback; the levels are our own.
    """
    return Blocks(2, block, Nearest())
