"""Comparisons of the CUDA kernels with the reference, to the bit.

The kernels run on a GPU, or on the CPU, compiled by `on_cpu`.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from hpcsgd.kernels import packed_bytes, reference
from hpcsgd.kernels.cuda import SAMPLE, Cuda, threshold_of

GPU = torch.device("cuda", 0)
T = TypeVar("T")
GUARD = 64
"""The number of guard elements before and after a tensor."""
UNTOUCHED = 0xA5
"""The value of guard elements of integer tensors; those of other tensors are NaN."""


@dataclass(frozen=True)
class Place:
    """A device, or its replacement, on which kernels run."""

    library: Cuda
    device: torch.device
    put: Callable[[Tensor, int], Tensor]
    """`put(x, shift)` returns a copy of x that begins `shift` elements after an aligned address."""
    without_waiting: Callable[[], AbstractContextManager[None]]
    """A context for calls that must not wait for the device."""
    one_of: int = 1
    """Only one of this many similar cases is tested."""

    def some(self, cases: Sequence[T]) -> Sequence[T]:
        return cases[(len(cases) - 1) % self.one_of :: self.one_of]  # includes the last case


@contextlib.contextmanager
def on_gpu(library: Cuda) -> Iterator[Place]:
    """Kernels on the GPU. In `without_waiting` torch raises an error if a call waits for the GPU."""
    library.require(GPU)

    def put(x: Tensor, shift: int) -> Tensor:
        return torch.cat([torch.zeros(shift, dtype=x.dtype), x]).to(GPU)[shift:]

    @contextlib.contextmanager
    def without_waiting() -> Iterator[None]:
        before = torch.cuda.get_sync_debug_mode()
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
                torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    yield Place(library, GPU, put, without_waiting)
    torch.cuda.synchronize()


@contextlib.contextmanager
def on_cpu(path: Path, one_of: int = 1, seed: int = 1, guard: int = GUARD) -> Iterator[Place]:
    """Kernels on the CPU, in the library that `on_cpu.built` made.

    New memory is filled with NaN. Tensors have guard elements around them that kernels must not read or
    write.
    """
    library = Cuda.load(path)
    library.functions.stand_in_stream.restype = ctypes.c_void_p
    library.functions.stand_in_seed(ctypes.c_uint64(seed))
    around: list[Tensor] = []

    def put(x: Tensor, shift: int) -> Tensor:
        nobodys = torch.nan if x.is_floating_point() else UNTOUCHED
        room = torch.full((2 * guard + shift + x.numel(),), nobodys, dtype=x.dtype)
        before, there, after = room.split([guard + shift, x.numel(), guard])
        assert (before.data_ptr() % 64 == 0) or x.numel() == 0
        around.extend([before, after])
        return there.copy_(x)

    module = importlib.import_module("hpcsgd.kernels.cuda")  # the package has a function of this name
    patched = mock.patch.multiple(
        module,
        _current=lambda _: _in_a_call(library.functions),
        _copied=lambda rows, _: torch.from_numpy(rows.copy()),
    )
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # makes torch fill new memory
    try:
        with patched:
            yield Place(library, torch.device("cpu"), put, contextlib.nullcontext, one_of)
    finally:
        torch.use_deterministic_algorithms(before)
    assert all((each.isnan() if each.is_floating_point() else each == UNTOUCHED).all() for each in around)


@contextlib.contextmanager
def _in_a_call(functions: ctypes.CDLL) -> Iterator[tuple[int, int]]:
    """Make device 2 current for a call, and check afterwards that the caller's device is current again."""
    callers = functions.stand_in_device()
    yield 2, functions.stand_in_stream(2)
    assert functions.stand_in_device() == callers


def check_largest(place: Place, x: Tensor, *segments: Tensor, shift: int = 0) -> None:
    """Check `largest` several times, because blocks run in a different order each time."""
    expected = reference.largest(x, *segments)
    there = place.put(x, shift)
    for _ in place.some(range(3)):
        with place.without_waiting():
            found = place.library.largest(there, *segments)
        torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0)


def check_threshold(place: Place, x: Tensor, k: int) -> None:
    """Check the threshold for candidates against that of the sample: a wrong one would only cost time."""
    n = x.numel()
    memory = torch.empty(8 * n + 2**20, dtype=torch.uint8, device=place.device)
    [rank], _ = threshold_of(np.array([n]), np.array([k]))
    assert rank > 0
    with mock.patch.object(Cuda, "_memory", return_value=memory):
        place.library.largest(place.put(x, 0), *(torch.tensor([each]) for each in (0, n, k)))
    magnitudes = x[torch.from_numpy(sample(place.library, n))].abs().sort(descending=True).values
    key = memory[:4].view(torch.int32).item()  # the first field of the first State
    assert key == magnitudes[rank - 1].view(torch.int32).item() + 1


def check_above(place: Place, x: Tensor, threshold: float, shift: int = 0) -> None:
    found = place.library.above(place.put(x, shift), threshold)
    assert torch.equal(found.cpu(), reference.above(x, threshold))


def check_accumulate(
    place: Place, acc: Tensor, g: Tensor, starts: Tensor, shifts: tuple[int, int] = (0, 0)
) -> None:
    """Check that sums equal the reference to the bit, and that norms are close to it and reproducible."""
    sums = acc.clone()
    expected = reference.accumulate(sums, g.clone(), starts)
    found = []
    for _ in range(2):
        own, theirs = place.put(acc, shifts[0]), place.put(g, shifts[1])
        with place.without_waiting():
            norms = place.library.accumulate(own, theirs, starts)
        assert torch.equal(own.cpu(), sums)
        assert not theirs.view(torch.int16 if g.dtype.itemsize == 2 else torch.int32).any()
        found.append(norms.cpu())
    torch.testing.assert_close(found[0], expected, rtol=1e-13, atol=0)
    assert torch.equal(*found)


def check_pack(
    place: Place, x: Tensor, block: int, bits: int, draw: int | None, shifts: tuple[int, int] = (0, 0)
) -> None:
    """Check that the packed bytes and the unpacked values equal those of the reference."""
    n = x.numel()
    code, out = torch.zeros(packed_bytes(n, block, bits), dtype=torch.uint8), torch.full((n,), 7.5)
    reference.pack(x, code, block, bits, draw)
    reference.unpack(code, out, block, bits)
    there, packed = place.put(x, shifts[0]), place.put(torch.zeros_like(code), 4 * shifts[1])
    back = place.put(torch.full((n,), 7.5), shifts[0])
    with place.without_waiting():
        place.library.pack(there, packed, block, bits, draw)
        place.library.unpack(packed, back, block, bits)
    assert torch.equal(packed.cpu(), code)
    torch.testing.assert_close(back.cpu(), out, rtol=0, atol=0, equal_nan=True)


def sample(library: Cuda, n: int) -> np.ndarray:
    """Return the positions of the sample that `largest` takes in a segment of n elements."""
    positions = np.zeros(SAMPLE, np.int64)
    library.functions.hpcsgd_cuda_sample(ctypes.c_int64(n), positions.ctypes.data_as(ctypes.c_void_p))
    return positions
