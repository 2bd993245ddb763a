"""The shared object built from csrc/cuda/, called by ctypes on `data_ptr()`: no part of it uses torch.

Arguments are as in `hpcsgd.kernels`, which checks them. Here they are contiguous, on one CUDA device, and
float32 unless stated otherwise; lists of segments are on the CPU. Work goes to torch's current stream of that
device. Only `above` waits for it, where the host has to know the number of indices.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcsgd.kernels.native import GRADIENT_TYPES, float32_at_least

FILE = Path(__file__).with_name("libhpcsgd_cuda.so")
TILE, GROUP, SAMPLE = 8192, 16, 8192
"""Elements of a tile, tiles of a group, elements of a sample: the same numbers as in csrc/cuda/."""
_ROW = 9 * 8  # bytes of a row of `Table.rows`
_LEAD = 3  # elements by which a tile may begin before its segment, at a multiple of 16 bytes
_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_WHERE = [_INT, _POINTER]  # device, stream
_LAUNCHES = {
    "usable": [_INT],
    "accumulate": [*_WHERE, _POINTER, _POINTER, _INT, _POINTER, _LONG, _LONG, _POINTER, _POINTER],
    "largest": [*_WHERE, _POINTER, _POINTER, _LONG, _LONG, _LONG, _LONG, _POINTER, _POINTER],
    "count_above": [*_WHERE, _POINTER, _LONG, ctypes.c_float, _POINTER],
    "write_above": [*_WHERE, _POINTER, _LONG, _POINTER, _POINTER],
    "pack": [*_WHERE, _POINTER, _LONG, _LONG, _INT, _INT, ctypes.c_uint32, _POINTER],
    "unpack": [*_WHERE, _POINTER, _LONG, _LONG, _INT, _POINTER],
}
_BYTES = {"accumulate_bytes": [_LONG], "largest_bytes": [_LONG] * 4, "above_bytes": [_LONG]}


class Table(NamedTuple):
    """The description of S segments that the kernels get.

    `rows` (S, 9) is int64, with one `struct Segment` of csrc/cuda/ in each row. The other fields are totals
    over all segments.
    """

    rows: np.ndarray
    tiles: int
    groups: int
    candidates: int
    indices: int

    @classmethod
    def of(cls, starts: np.ndarray, stops: np.ndarray, k: np.ndarray) -> Table:
        """Return a table with one row for each segment."""
        sizes = stops - starts
        tiles = -(-(sizes + _LEAD) // TILE)
        groups = -(-tiles // GROUP)
        rank, room = threshold_of(sizes, k)
        sums = np.zeros((len(k) + 1, 4), dtype=np.int64)
        np.cumsum(np.stack([tiles, groups, room, k], axis=1), axis=0, out=sums[1:])
        rows = np.column_stack([starts, sizes, k, rank, room, sums[:-1]])
        return cls(rows, *sums[-1].tolist())


def threshold_of(sizes: np.ndarray, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for each segment which magnitude of a sample is the threshold, and the room for candidates.

    To find the k largest magnitudes of a segment, the kernel takes a sample of SAMPLE elements. If the first
    result is r, the r-th largest magnitude of the sample is the threshold. Elements that are not below it are
    candidates for the k largest. The second result is the number of candidates for which there is memory.

    About p ± √p elements of the sample are among the k largest, with p = k·SAMPLE/size. r is far above p, and
    the room far above the number of candidates to expect. For elements in random order, either is too small
    less than once in 10⁴ times. Then the kernel reads all elements several times. Both are 0 if a sample does
    not save time, because there are few elements or many are selected. Then all elements are candidates.
    """
    p = k * (SAMPLE / np.maximum(sizes, 1))
    rank = (p + 4 * np.sqrt(p)).astype(np.int64) + 4
    room = np.ceil((rank + 5 * np.sqrt(rank) + 16) * (sizes / SAMPLE)).astype(np.int64)
    pays = (sizes >= 2 * SAMPLE) & (room <= sizes // 2)
    return np.where(pays, rank, 0), np.where(pays, room, 0)


@dataclass(frozen=True)
class Cuda:
    """The functions of the shared object in `path`, for the devices that `require` accepts."""

    path: Path
    functions: ctypes.CDLL

    @classmethod
    def load(cls, path: Path = FILE) -> Cuda:
        """Load the shared object; raise `OSError` if it is missing or from another version of csrc/cuda/."""
        functions = ctypes.CDLL(str(path))
        try:
            for name, arguments in (_LAUNCHES | _BYTES).items():
                function = getattr(functions, f"hpcsgd_cuda_{name}")  # `functions` keeps it with its types
                function.argtypes, function.restype = arguments, _INT if name in _LAUNCHES else _LONG
            functions.hpcsgd_cuda_error.argtypes = [_INT]
            functions.hpcsgd_cuda_error.restype = ctypes.c_char_p
            layout = (_LONG * 4)()
            functions.hpcsgd_cuda_layout(layout)
        except AttributeError as error:
            raise OSError(f"{path} was built from another version of csrc/cuda/: {error}") from error
        if tuple(layout) != (TILE, GROUP, SAMPLE, _ROW):
            raise OSError(f"{path} was built from another version of csrc/cuda/: {tuple(layout)}")
        return cls(path, functions)

    def __str__(self) -> str:
        return f"cuda, {self.path.name}"

    def require(self, device: torch.device) -> None:
        """Raise `OSError` if the library has no code for `device`, or needs a newer driver."""
        if not torch.cuda.is_available():
            raise OSError(f"{self.path.name} cannot be used on {device}: torch finds no GPU")
        with _current(device) as (number, _):
            error = self.functions.hpcsgd_cuda_usable(number)
        if error:
            raise OSError(f"{self.path.name} cannot be used on {device}: {self._message(error)}")

    def accumulate(self, acc: Tensor, g: Tensor, starts: Tensor) -> Tensor:
        norms = torch.empty(len(starts) - 1, dtype=torch.float64, device=acc.device)
        if norms.numel() == 0:
            return norms
        edges = starts.numpy()
        table = Table.of(edges[:-1], edges[1:], np.zeros(len(norms), dtype=np.int64))
        rows = _copied(table.rows, acc.device)
        memory = self._memory(acc.device, "accumulate_bytes", table.tiles)
        vectors = (acc.data_ptr(), g.data_ptr(), GRADIENT_TYPES[g.dtype])
        sizes = (len(norms), table.tiles)
        self._call(
            "accumulate", acc.device, *vectors, rows.data_ptr(), *sizes, memory.data_ptr(), norms.data_ptr()
        )
        return norms

    def largest(self, x: Tensor, starts: Tensor, stops: Tensor, k: Tensor) -> Tensor:
        some = k.numpy() > 0
        table = Table.of(*(each.numpy()[some] for each in (starts, stops, k)))
        out = torch.empty(table.indices, dtype=torch.int64, device=x.device)
        if table.indices == 0:
            return out
        rows = _copied(table.rows, x.device)
        sizes = (len(table.rows), table.tiles, table.groups, table.candidates)
        memory = self._memory(x.device, "largest_bytes", *sizes)
        pointers = (x.data_ptr(), rows.data_ptr(), *sizes, memory.data_ptr(), out.data_ptr())
        self._call("largest", x.device, *pointers)
        return out

    def above(self, x: Tensor, threshold: float) -> Tensor:
        """Do what `hpcsgd.kernels.above` does; wait for the device, which computes the number of indices."""
        if x.numel() == 0:
            return torch.empty(0, dtype=torch.int64, device=x.device)
        least = float32_at_least(threshold)
        memory = self._memory(x.device, "above_bytes", x.numel())
        self._call("count_above", x.device, x.data_ptr(), x.numel(), least, memory.data_ptr())
        count = int(memory[:8].view(torch.int64).item())
        out = torch.empty(count, dtype=torch.int64, device=x.device)
        self._call("write_above", x.device, x.data_ptr(), x.numel(), memory.data_ptr(), out.data_ptr())
        return out

    def pack(self, x: Tensor, code: Tensor, block: int, bits: int, draw: int | None) -> None:
        """Do what `hpcsgd.kernels.pack` does, for numbers of 8 or 4 bits."""
        if x.numel():
            rounding = (int(draw is not None), draw or 0)
            self._call("pack", x.device, x.data_ptr(), x.numel(), block, bits, *rounding, code.data_ptr())

    def unpack(self, code: Tensor, out: Tensor, block: int, bits: int) -> None:
        """Do what `hpcsgd.kernels.unpack` does, for numbers of 8 or 4 bits."""
        if out.numel():
            self._call("unpack", out.device, code.data_ptr(), out.numel(), block, bits, out.data_ptr())

    def _memory(self, device: torch.device, name: str, *sizes: int) -> Tensor:
        # torch may reuse this memory on the same stream, because operations there run after the kernels.
        needed = getattr(self.functions, f"hpcsgd_cuda_{name}")(*sizes)
        return torch.empty(needed, dtype=torch.uint8, device=device)

    def _call(self, name: str, device: torch.device, *arguments: float) -> None:
        function = getattr(self.functions, f"hpcsgd_cuda_{name}")
        with _current(device) as (number, stream):
            error = function(number, stream, *arguments)
        if error:
            raise RuntimeError(f"hpcsgd_cuda_{name} on {device}: {self._message(error)}")

    def _message(self, error: int) -> str:
        return self.functions.hpcsgd_cuda_error(error).decode()


@contextlib.contextmanager
def _current(device: torch.device) -> Generator[tuple[int, int], None, None]:
    """Make `device` the current one; yield its number and torch's current stream there.

    The library itself changes to the device and back. Unlike the library, torch makes no context on a device
    that has none.
    """
    with torch.cuda.device(device):
        yield device.index, torch.cuda.current_stream(device).cuda_stream


def _copied(rows: np.ndarray, device: torch.device) -> Tensor:
    # Nothing waits for the copy from pinned memory; torch does not reuse that memory until it is done.
    return torch.as_tensor(rows, device="cpu").pin_memory().to(device, non_blocking=True)
