"""The CUDA kernels compiled for the CPU: with sanitizers, and with planted faults that must be detected."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import programs
from hpcsgd.kernels.cuda import Cuda
from kernels import on_cpu

TESTS = Path(__file__).parents[1]
needs_compiler = pytest.mark.skipif(on_cpu.missing() is not None, reason=str(on_cpu.missing()))
SEEDS = 4

BOUNDS = [
    ("tiles.cuh", "first = tile == 0 ? lead : 0;", "first = 0;"),
    ("tiles.cuh", "stop - begin < TILE ? int(stop - begin) : TILE", "TILE"),
    ("tiles.cuh", "return first == 0 && last == TILE;", "return true;"),
    ("tiles.cuh", "first <= position && position < last", "position < last"),
    ("tiles.cuh", "first <= position && position < last", "first <= position"),
    ("tiles.cuh", "tile.has(place) ? key_of(x[place]) : 0", "key_of(x[place])"),
    ("sums.cuh", "i < count ? numbers[i] : Number(0)", "numbers[i]"),
    ("sums.cuh", "if (i < count) numbers[i] =", "numbers[i] ="),
    ("sums.cuh", "lane < N / WARP ? warps[lane] : Number(0)", "warps[lane]"),
    ("sums.cuh", "if (lane >= step) value += lower;", "value += lower;"),
    ("candidates.cuh", "of_warp == 0 || int64_t(taken) + total > segment.room", "of_warp == 0"),
    ("choice.cuh", "values[min(i, count - 1)]", "values[i]"),
    ("choice.cuh", "i < count ? key : 0", "key"),
    ("choice.cuh", "candidates < segment.k || candidates > segment.room", "candidates > segment.room"),
    ("choice.cuh", "candidates < segment.k || candidates > segment.room", "candidates < segment.k"),
    ("choice.cuh", "number < tiles_of(segment.size)", "true"),
    ("choice.cuh", "min(first + length, segment.size)", "first + length"),
    ("choice.cuh", "equal && equal_before < sought.rank", "equal"),
    ("choice.cuh", "min(equal_before, sought.rank)", "equal_before"),
    ("choice.cuh", "if (!last) return;", ""),
    ("accumulate.cu", "if (!tile.has(place)) continue;", ""),
    ("accumulate.cu", "i < tiles; i += THREADS", "i <= tiles; i += THREADS"),
    ("packing.cu", "at + i < layout.n ? x[at + i] : 0.0f", "x[at + i]"),
    ("packing.cu", "return at + EIGHT <= n;", "return true;"),
    ("packing.cu", "lane == 0 && begin < layout.n", "lane == 0"),
    ("packing.cu", "at + VECTOR <= layout.n", "true"),
    ("packing.cu", "at + VECTOR <= n &&", "true &&"),
    ("packing.cu", "i < VECTOR && at + i < n", "i < VECTOR"),
    ("packing.cu", "min(at, layout.n - 1) / layout.block", "at / layout.block"),
    ("accumulate.cu", "reinterpret_cast<uintptr_t>(g) % sizeof(Four<Element>) == 0", "true"),
]
"""File, text with a bounds check, and the text without the check.

The list lacks `if (segment.rank == 0) return;` in collect(), which only saves time: no segment has room
there.
"""


@pytest.fixture
def library() -> Iterator[Cuda]:
    cuda = Cuda.load(on_cpu.built(on_cpu.sources()))
    cuda.functions.stand_in_stream.restype = ctypes.c_void_p
    yield cuda
    assert cuda.functions.stand_in_device() == 0


def trial(library: Path, seeds: int, *preloaded: str) -> programs.Done:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]),
        "LD_PRELOAD": " ".join(preloaded),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python itself leaks
    }
    command = [sys.executable, "-m", "kernels.cuda_trial", library, str(seeds)]
    return programs.run(command, env=environment, timeout=on_cpu.PATIENCE, check=False)


def sanitized(sources: dict[str, str]) -> programs.Done:
    runtimes = [
        programs.run(["g++", f"-print-file-name={name}"]).stdout for name in ("libasan.so", "libubsan.so")
    ]
    return trial(on_cpu.built(sources, *on_cpu.SANITIZERS), 1, *map(str.strip, runtimes))


def without(file: str, text: str, instead: str, number: int = 0) -> dict[str, str]:
    """Return the sources with one occurrence of a text replaced; the occurrence must exist."""
    sources = on_cpu.sources()
    parts = sources[file].split(text)
    assert number + 1 < len(parts), f"{file}: {text}"
    sources[file] = text.join(parts[: number + 1]) + instead + text.join(parts[number + 1 :])
    return sources


def barriers() -> list[tuple[str, int]]:
    return [
        (name, number)
        for name, text in on_cpu.sources().items()
        for number in range(len(re.findall(r"__syncthreads\(\);", text)))
    ]


@needs_compiler
@pytest.mark.long
@pytest.mark.timeout(600)
def test_no_sanitizer_complains():
    if reason := on_cpu.missing_sanitizers():
        pytest.skip(reason)
    done = sanitized(on_cpu.sources())
    assert done.returncode == 0, done.stderr


@needs_compiler
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("file", "number"), barriers())
def test_a_missing_barrier_is_seen(file, number):
    assert trial(on_cpu.built(without(file, "__syncthreads();", ";", number)), SEEDS).returncode != 0


@needs_compiler
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("file", "text", "instead"), BOUNDS)
def test_a_missing_bounds_check_is_seen(file, text, instead):
    """Wrong results or a sanitizer must reveal it."""
    if reason := on_cpu.missing_sanitizers():
        pytest.skip(reason)
    sources = without(file, text, instead)
    assert trial(on_cpu.built(sources), 1).returncode != 0 or sanitized(sources).returncode != 0


@needs_compiler
def test_the_callers_device_stays_current(library):
    x, out = torch.zeros(10), torch.zeros(10, dtype=torch.int64)
    memory = torch.zeros(library.functions.hpcsgd_cuda_above_bytes(10), dtype=torch.uint8)
    for current, device in [(0, 2), (3, 1), (2, 2), (1, 0)]:
        library.functions.stand_in_current(current)
        stream = library.functions.stand_in_stream(device)
        pointers = (x.data_ptr(), 10)
        assert not library.functions.hpcsgd_cuda_count_above(
            device, stream, *pointers, 0.5, memory.data_ptr()
        )
        assert not library.functions.hpcsgd_cuda_write_above(
            device, stream, *pointers, memory.data_ptr(), out.data_ptr()
        )
        assert not library.functions.hpcsgd_cuda_usable(device)
        assert library.functions.hpcsgd_cuda_usable(99)
        assert library.functions.stand_in_device() == current
    library.functions.stand_in_current(0)


@needs_compiler
def test_what_cuda_refuses_is_refused(library):
    error = library.functions.hpcsgd_cuda_usable(99)
    assert library._message(error) == "invalid device ordinal"
    stream = library.functions.stand_in_stream(1)  # a stream of another device than the call's
    assert library.functions.hpcsgd_cuda_count_above(0, stream, None, 10, 0.5, None) == error
    nothing = library.functions.stand_in_stream(0)
    assert library._message(
        library.functions.hpcsgd_cuda_count_above(0, nothing, None, -20_000, 0.5, None)
    ) == ("invalid configuration")
