"""Operations on long vectors that must run at memory speed.

For sparse reductions they accumulate gradients, select their largest elements and encode their indices. For
quantizers they pack vectors into few bits.

Native libraries run them for float32 on the CPU and on NVIDIA GPUs, if they were built (from csrc/ and
csrc/cuda/; the one for GPUs has no 2-bit numbers). `hpcsgd.kernels.on_device` is for other devices, and
`hpcsgd.kernels.reference` for all other cases; it defines the results. All implementations agree bit for bit,
except for the order in which `accumulate` sums a norm.
"""

from __future__ import annotations

import functools
import logging
import math
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from hpcsgd.errors import UserError
from hpcsgd.kernels import chosen, on_device, reference
from hpcsgd.kernels.cuda import Cuda
from hpcsgd.kernels.native import GRADIENT_TYPES, Native

__all__ = [
    "Cuda",
    "Native",
    "above",
    "accumulate",
    "chosen_bytes",
    "cuda",
    "decode",
    "decode_chosen",
    "encode",
    "encode_chosen",
    "largest",
    "native",
    "pack",
    "packed_bytes",
    "unpack",
]

logger = logging.getLogger(__name__)


@functools.cache
def native() -> Native | None:
    """Return the native library for the CPU; if there is none, warn once and return None."""
    try:
        return Native.load()
    except OSError as error:
        logger.warning(
            "no native kernels, so sparse reductions and quantizers will be slow: pip install hpcsgd again "
            "where there is a C++ compiler (%s)",
            error,
        )
        return None


@functools.cache
def cuda(device: torch.device) -> Cuda | None:
    """Return the native library for a CUDA device; if none can be used there, warn once and return None."""
    if device.type != "cuda" or torch.version.hip:  # AMD's warps have 64 threads; torch calls them cuda, too
        logger.warning("torch.topk selects gradients on %s: native kernels are for NVIDIA's GPUs", device)
        return None
    try:
        library = Cuda.load()
        library.require(device)
    except OSError as error:
        logger.warning(
            "no native kernels on %s, so sparse reductions will be slow there: pip install hpcsgd again "
            "where there is an nvcc of the driver's version (%s)",
            device,
            error,
        )
        return None
    return library


def accumulate(acc: Tensor, g: Tensor, starts: Tensor) -> Tensor:
    """Do `acc += g` and `g = 0` in one pass; return the squared L2 norm of each segment of `acc` after it.

    `acc`: (M,) float32, contiguous; `g`: (M,) float32, bfloat16 or float16; `starts`: (L + 1,) int64 on the
    CPU, ascending from 0 to M: segment i is [starts[i], starts[i + 1]). Returns (L,) float64 on `acc`'s
    device, the same bits for any number of threads. `acc` and `g` may also both be float64. Raises
    `UserError` for other dtypes.
    """
    kinds = (torch.float64,) if acc.dtype == torch.float64 else tuple(GRADIENT_TYPES)
    if acc.dtype not in (torch.float32, torch.float64) or g.dtype not in kinds:
        raise UserError(
            f"gradients of {g.dtype} cannot be accumulated in {acc.dtype}; allowed: float32, bfloat16 or "
            "float16 in float32, float64 in float64"
        )
    assert acc.dim() == 1
    assert acc.shape == g.shape
    assert acc.device == g.device
    _require_lists(starts)
    bounds = starts.numpy()
    assert bounds.size > 0
    assert bounds[0] == 0
    assert bounds[-1] == acc.numel()
    assert (bounds[1:] >= bounds[:-1]).all()
    library = _serving(acc) if g.is_contiguous() else None
    if library is None:
        return reference.accumulate(acc, g, starts)
    return library.accumulate(acc, g, starts)


def largest(x: Tensor, starts: Tensor, stops: Tensor, k: Tensor) -> Tensor:
    """Return the indices of the `k[i]` elements of largest magnitude in each `x[starts[i]:stops[i]]`.

    `x`: (M,) of a floating dtype; `starts`, `stops`, `k`: (S,) int64 on the CPU, segments ascending and
    disjoint, 0 <= k <= stops - starts. Returns (sum(k),) int64 on `x`'s device, ascending, with exactly k[i]
    of segment i. Of equal magnitudes the lowest index comes first; NaN > infinity > finite, all NaNs are
    equal. Raises `UserError` if `x` is not floating.
    """
    _require_floating(x)
    _require_lists(starts, stops, k)
    assert starts.numel() == stops.numel() == k.numel()
    library = _serving(x)
    if library is None or not x.is_cpu:  # the native CPU library checks the segments itself, faster
        _require_segments(x.numel(), starts.numpy(), stops.numpy(), k.numpy())
    return (library or _in_torch(x)).largest(x, starts, stops, k)


def above(x: Tensor, threshold: float) -> Tensor:
    """Return the indices of the elements of `x` with |x| >= `threshold`, and of NaNs.

    `x`: (M,) of a floating dtype. The result is int64, ascending. Raises `UserError` if `threshold` is NaN or
    `x` is not of a floating dtype.
    """
    _require_floating(x)
    if math.isnan(threshold):
        raise UserError("a threshold cannot be NaN")
    library = _serving(x)
    return reference.above(x, threshold) if library is None else library.above(x, threshold)


def encode(indices: Tensor, bound: int = 2**63) -> Tensor:
    """Return `indices` as uint8 for `decode`, on their device.

    `indices`: int64, strictly ascending, >= 0 and < `bound`. Each index is coded as its distance from the one
    before, minus 1, in groups of 7 bits from the low end on. The top bit of a byte is set if another byte
    follows. An index takes 1 to 9 bytes; if one of 100 elements is selected, 1.3 on average. Raises
    `UserError` if `indices` on the CPU do not ascend; on other devices this is not checked.
    """
    assert indices.dtype == torch.int64
    assert indices.dim() == 1
    if not indices.is_cpu:
        return on_device.encode(indices, bound)
    library = native() if _in_memory(indices) else None
    return reference.encode(indices) if library is None else library.encode(indices)


def decode(code: Tensor, count: int) -> Tensor:
    """Return the `count` indices (int64) that `encode` has encoded as `code`.

    Raises `UserError` for any other code on the CPU; on other devices this is not checked.
    """
    assert code.dtype == torch.uint8
    assert code.dim() == 1
    assert count >= 0
    if not code.is_cpu:
        return on_device.decode(code, count)
    library = native() if _in_memory(code) else None
    return reference.decode(code, count) if library is None else library.decode(code, count)


def chosen_bytes(starts: Tensor, stops: Tensor, k: Tensor) -> int:
    """Return the number of bytes that `encode_chosen` returns for k[i] indices of each segment."""
    return chosen.code_bytes(stops - starts, k)


def encode_chosen(indices: Tensor, starts: Tensor, stops: Tensor, k: Tensor) -> Tensor:
    """Return a code that says which `k[i]` elements of `[starts[i], stops[i])` were selected, for all i.

    `indices`: int64, ascending; `starts`, `stops`, `k` as in `largest`. The code is uint8 on the device of
    `indices`, with `chosen_bytes` elements: see `hpcsgd.kernels.chosen`. Indices on a device are copied to
    the host first. Raises `UserError` for indices that do not ascend, or lie outside the segments.
    """
    _require_chosen(starts, stops, k)
    assert indices.dtype == torch.int64
    assert indices.numel() == int(k.sum())
    here = indices.cpu().contiguous()
    code = torch.empty(chosen_bytes(starts, stops, k), dtype=torch.uint8, device="cpu")
    library = native()
    (chosen.encode if library is None else library.encode_chosen)(here, starts, stops, k, code)
    return code.to(indices.device)


def decode_chosen(code: Tensor, starts: Tensor, stops: Tensor, k: Tensor) -> Tensor:
    """Return the indices that `encode_chosen` has encoded as `code`; raise `UserError` for other codes."""
    _require_chosen(starts, stops, k)
    assert code.dtype == torch.uint8
    assert code.numel() == chosen_bytes(starts, stops, k)
    here = code.cpu().contiguous()
    indices = torch.empty(int(k.sum()), dtype=torch.int64, device="cpu")
    library = native()
    (chosen.decode if library is None else library.decode_chosen)(here, starts, stops, k, indices)
    return indices.to(code.device)


def packed_bytes(n: int, block: int, bits: int) -> int:
    """Return the number of bytes that `pack` writes for n elements."""
    return 4 * -(-n // block) + -(-n * bits // 8)


def pack(x: Tensor, code: Tensor, block: int, bits: int, draw: int | None = None) -> None:
    """Write `x` into `code` as numbers of 8, 4 or 2 bits, with a scale for every `block` elements.

    `x`: (n,) float32; `block`: a multiple of 8; `code`: uint8, `packed_bytes` elements, aligned for float32.
    Each number is x divided by the scale, rounded to nearest even. With a `draw`, a 32-bit number, it is
    rounded up or down at random, such that its mean is exact. Equal draws give equal results. The scale is
    the block's largest magnitude divided by 127 (8 bits) or 7 (4 bits). It is NaN if the block has a NaN or
    an infinity, so that the whole block becomes NaNs.
    Blocks of magnitudes below 10⁻⁴³, which float32 cannot divide by 127 or 7, become zeros.

    Numbers of 2 bits are −2, −1, 0 and 1, rounded to nearest. The scale is 1.4 times the mean magnitude. It
    is negative if the element of largest magnitude is positive, so that −2 stands for elements of its sign.
    Zeros stay zeros.
    """
    _require_packable(x, code, block, bits)
    assert bits > 2 or draw is None
    (_packing(x, code, bits) or reference).pack(x, code, block, bits, draw)


def unpack(code: Tensor, out: Tensor, block: int, bits: int) -> None:
    """Write the numbers in `code` into `out`: the inverse of `pack`, except for rounding."""
    _require_packable(out, code, block, bits)
    (_packing(out, code, bits) or reference).unpack(code, out, block, bits)


def _require_packable(x: Tensor, code: Tensor, block: int, bits: int) -> None:
    assert x.dtype == torch.float32
    assert code.dtype == torch.uint8
    assert bits in (2, 4, 8)
    assert block > 0
    assert block % 8 == 0
    assert code.numel() == packed_bytes(x.numel(), block, bits)


def _serving(x: Tensor) -> Native | Cuda | None:
    if x.dtype != torch.float32 or not x.is_contiguous():
        return None
    if x.is_cpu:
        return native()
    return cuda(x.device)


def _packing(x: Tensor, code: Tensor, bits: int) -> Native | Cuda | None:
    if _in_memory(x) and _in_memory(code):
        return native()
    on_gpu = x.is_cuda and code.is_cuda and x.is_contiguous() and code.is_contiguous()
    return cuda(x.device) if on_gpu and bits > 2 else None


def _in_torch(x: Tensor) -> ModuleType:
    """Return the module with the operations for `x` in torch, for use without a native library."""
    return reference if x.is_cpu or x.dtype == torch.float64 else on_device


def _in_memory(x: Tensor) -> bool:
    return x.is_cpu and x.is_contiguous()


def _require_lists(*lists: Tensor) -> None:
    for each in lists:
        assert each.dtype == torch.int64
        assert each.dim() == 1
        assert _in_memory(each)


def _require_chosen(starts: Tensor, stops: Tensor, k: Tensor) -> None:
    _require_lists(starts, stops, k)
    assert starts.numel() == stops.numel() == k.numel()
    assert bool(((k >= 0) & (k <= stops - starts)).all())


def _require_segments(n: int, starts: np.ndarray, stops: np.ndarray, k: np.ndarray) -> None:
    assert ((k >= 0) & (k <= stops - starts)).all()
    assert (starts[1:] >= stops[:-1]).all()
    assert starts.size == 0 or 0 <= starts[0] <= stops[-1] <= n


def _require_floating(x: Tensor) -> None:
    assert x.dim() == 1
    if not x.is_floating_point():
        raise UserError(f"elements of {x.dtype} cannot be ordered by magnitude; give a floating dtype")
