"""The shared object built from csrc/, called by ctypes on `data_ptr()`: no part of it uses torch.

Arguments are as in `hpcsgd.kernels`, which checks them. Here they are contiguous, on the CPU, and float32
unless stated otherwise. Every function is one call for all segments, which releases Python's lock.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hpcsgd.errors import UserError

FILE = Path(__file__).with_name("libhpcsgd_cpu.so")
GRADIENT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The allowed dtypes of the gradient `g` of `accumulate`, with their numbers in csrc/kernels.h."""
_OUT_OF_MEMORY, _NOT_ASCENDING, _MALFORMED = -1, -2, -3
_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_SIGNATURES = {
    "accumulate": [_POINTER, _POINTER, _INT, _POINTER, _LONG, _POINTER, _INT, _INT],
    "wanted": [_POINTER, _POINTER, _POINTER, _LONG, _LONG],
    "largest": [_POINTER, _POINTER, _POINTER, _POINTER, _LONG, _POINTER, _INT, _INT],
    "above": [_POINTER, _LONG, ctypes.c_float, _POINTER, _LONG, _INT, _INT],
    "share_out": [_POINTER, _POINTER, _LONG, _LONG, _LONG, _LONG, _POINTER, _POINTER],
    "encoded_bytes": [_POINTER, _LONG],
    "encode": [_POINTER, _LONG, _POINTER],
    "decode": [_POINTER, _LONG, _LONG, _POINTER],
    "encode_chosen": [_POINTER, _POINTER, _POINTER, _POINTER, _LONG, _POINTER, _LONG],
    "decode_chosen": [_POINTER, _LONG, _POINTER, _POINTER, _POINTER, _LONG, _POINTER],
    "pack": [_POINTER, _LONG, _LONG, _INT, _INT, ctypes.c_uint32, _POINTER, _INT, _INT],
    "unpack": [_POINTER, _LONG, _LONG, _INT, _POINTER, _INT, _INT],
}


@dataclass(frozen=True)
class Native:
    """The functions of the shared object in `path`.

    `portable`: do not use vector instructions that only some CPUs have. The functions use as many threads as
    torch does. Results have the same bits with any instructions and any number of threads.
    """

    path: Path
    functions: ctypes.CDLL
    portable: bool = False

    @classmethod
    def load(cls, path: Path = FILE) -> Native:
        """Load the shared object; raise `OSError` if it is missing or from another version of csrc/."""
        functions = ctypes.CDLL(str(path))
        try:
            for name, arguments in _SIGNATURES.items():
                function = getattr(functions, f"hpcsgd_{name}")  # `functions` keeps it with its types
                function.argtypes, function.restype = arguments, _LONG
            functions.hpcsgd_instructions.restype = ctypes.c_char_p
        except AttributeError as error:
            raise OSError(f"{path} was built from another version of csrc/: {error}") from error
        return cls(path, functions)

    @property
    def instructions(self) -> str:
        """The instruction set: "avx2" or "portable"."""
        return "portable" if self.portable else self.functions.hpcsgd_instructions().decode()

    def __str__(self) -> str:
        return f"native, {self.instructions}, {self.path.name}"

    def accumulate(self, acc: Tensor, g: Tensor, starts: Tensor) -> Tensor:
        norms = torch.empty(len(starts) - 1, dtype=torch.float64, device="cpu")
        kind = GRADIENT_TYPES[g.dtype]
        arguments = (acc.data_ptr(), g.data_ptr(), kind, starts.data_ptr(), len(norms), norms.data_ptr())
        self._call("accumulate", *arguments, *self._how())
        return norms

    def largest(self, x: Tensor, starts: Tensor, stops: Tensor, k: Tensor) -> Tensor:
        """Do what `hpcsgd.kernels.largest` does; the library also checks the segments."""
        segments = (starts.data_ptr(), stops.data_ptr(), k.data_ptr(), k.numel())
        out = torch.empty(self._call("wanted", *segments, x.numel()), dtype=torch.int64, device="cpu")
        self._call("largest", x.data_ptr(), *segments, out.data_ptr(), *self._how())
        return out

    def above(self, x: Tensor, threshold: float) -> Tensor:
        least = float32_at_least(threshold)
        room = max(1024, x.numel() // 16)  # memory that is not written to costs nothing
        while True:
            out = torch.empty(room, dtype=torch.int64, device="cpu")
            arguments = (x.data_ptr(), x.numel(), least, out.data_ptr(), room)
            count = self._call("above", *arguments, *self._how())
            if count <= room:
                return out[:count].clone()
            room = count

    def share_out(
        self, squared_norms: Tensor, bounds: Tensor, k: int, floor: int, workers: int
    ) -> tuple[Tensor, Tensor]:
        """Run algorithms 3 and 4 of the DEFT paper: return k and the bin of each layer.

        k, int64, is the number of elements to select in the layer. One worker searches all layers with one
        bin, int32: see `deft`.
        """
        layers = squared_norms.numel()
        ks, bins = (
            torch.empty(layers, dtype=torch.int64, device="cpu"),
            torch.empty(layers, dtype=torch.int32, device="cpu"),
        )
        arguments = (squared_norms.data_ptr(), bounds.data_ptr(), layers, k, floor, workers)
        self._call("share_out", *arguments, ks.data_ptr(), bins.data_ptr())
        return ks, bins

    def encode(self, indices: Tensor) -> Tensor:
        count = indices.numel()
        code = torch.empty(
            self._call("encoded_bytes", indices.data_ptr(), count), dtype=torch.uint8, device="cpu"
        )
        self._call("encode", indices.data_ptr(), count, code.data_ptr())
        return code

    def decode(self, code: Tensor, count: int) -> Tensor:
        indices = torch.empty(count, dtype=torch.int64, device="cpu")
        self._call("decode", code.data_ptr(), code.numel(), count, indices.data_ptr())
        return indices

    def encode_chosen(self, indices: Tensor, starts: Tensor, stops: Tensor, k: Tensor, code: Tensor) -> None:
        segments = (starts.data_ptr(), stops.data_ptr(), k.data_ptr(), k.numel())
        self._call("encode_chosen", indices.data_ptr(), *segments, code.data_ptr(), code.numel())

    def decode_chosen(self, code: Tensor, starts: Tensor, stops: Tensor, k: Tensor, indices: Tensor) -> None:
        segments = (starts.data_ptr(), stops.data_ptr(), k.data_ptr(), k.numel())
        self._call("decode_chosen", code.data_ptr(), code.numel(), *segments, indices.data_ptr())

    def pack(self, x: Tensor, code: Tensor, block: int, bits: int, draw: int | None) -> None:
        rounding = (int(draw is not None), draw or 0)
        self._call("pack", x.data_ptr(), x.numel(), block, bits, *rounding, code.data_ptr(), *self._how())

    def unpack(self, code: Tensor, out: Tensor, block: int, bits: int) -> None:
        self._call("unpack", code.data_ptr(), out.numel(), block, bits, out.data_ptr(), *self._how())

    def _how(self) -> tuple[int, int]:
        return torch.get_num_threads(), int(self.portable)

    def _call(self, name: str, *arguments: float) -> int:
        done = getattr(self.functions, f"hpcsgd_{name}")(*arguments)
        if done >= 0:
            return done
        if done == _OUT_OF_MEMORY:
            raise MemoryError(f"hpcsgd_{name}: no memory for candidates")
        if done == _NOT_ASCENDING:
            raise UserError("indices to encode must ascend strictly from 0 or more")
        assert done == _MALFORMED, f"hpcsgd_{name}: {done}"
        raise UserError("bytes that are not the code of so many indices")


def float32_at_least(threshold: float) -> float:
    """Return the least float32 that is at least `threshold`.

    A float32 element is at least `threshold` if and only if it is at least the result.
    """
    with np.errstate(over="ignore"):
        nearest = np.float32(threshold)
    if float(nearest) < threshold:
        nearest = np.nextafter(nearest, np.float32(math.inf))
    return float(nearest)
