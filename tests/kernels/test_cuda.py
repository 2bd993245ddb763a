"""Comparisons of the CUDA kernels with the reference, to the bit. Some tests need no GPU."""

from __future__ import annotations

import importlib
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from arrays import MAKERS, cuts, lists, made, normal
from hpcsgd import UserError, kernels
from hpcsgd.kernels.cuda import FILE, GROUP, SAMPLE, TILE, Cuda, Table, threshold_of
from kernels import on_cpu as compiler
from kernels.cuda_cases import (
    GPU,
    Place,
    check_above,
    check_accumulate,
    check_largest,
    check_pack,
    check_threshold,
    on_cpu,
    on_gpu,
    sample,
)
from kernels.test_packing import elements, halves

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
everything = pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker.__name__)


@pytest.fixture(scope="module")
def library() -> Cuda:
    """The library, which loads without a GPU. Its absence is an error wherever it could have been built."""
    if not FILE.exists():
        home = os.environ.get("CUDA_HOME")
        if shutil.which("nvcc", path=f"{home}/bin" if home else None):
            pytest.fail("csrc/cuda/ was not built: pip install -e . does it")
        pytest.skip("no CUDA kernels, and no nvcc to build them with")
    return Cuda.load()


ON_GPU, EVERY_CASE = pytest.param("gpu", marks=gpu), pytest.param("cpu, every case", marks=pytest.mark.long)
thoroughly = pytest.mark.parametrize("place", [ON_GPU, EVERY_CASE], indirect=True)


@pytest.fixture(params=[ON_GPU, "cpu", EVERY_CASE])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """A GPU, or the kernels compiled for the CPU, with one of ten cases or all of them."""
    if request.param == "gpu":
        where = on_gpu(request.getfixturevalue("library"))
    else:
        where = on_cpu(request.getfixturevalue("compiled"), one_of=10 if request.param == "cpu" else 1)
    with where as there:
        yield there


@pytest.fixture(scope="session")
def compiled() -> Path:
    if reason := compiler.missing():
        pytest.skip(reason)
    return compiler.built(compiler.sources())


@pytest.fixture
def cuda(library: Cuda) -> Iterator[Cuda]:
    with on_gpu(library):
        yield library


@pytest.fixture
def fresh() -> Iterator[None]:
    """Clear the cache of `kernels.cuda` before and after the test."""
    kernels.cuda.cache_clear()
    yield
    kernels.cuda.cache_clear()


def test_a_debug_mode_that_warns_is_switched_off_again_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch warns when the mode is first set; as an error, this warning would leave the mode switched on."""
    modes: list[str | int] = [0]

    def set_mode(mode: str | int) -> None:
        modes.append(mode)
        if mode == "error":
            warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with on_gpu(mock.Mock()) as place, place.without_waiting():
        assert modes == [0, "error"]
    assert modes == [0, "error", 0]


# Tables


@hypothesis.given(
    sizes=st.lists(st.integers(1, 10**10) | st.integers(1, 10**5), min_size=1, max_size=9),
    part=st.floats(0, 1),
)
def test_a_tables_sums_are_those_of_the_rows_before(sizes, part):
    stops = np.cumsum(sizes)
    starts, k = stops - sizes, (np.array(sizes) * part).astype(np.int64)
    table = Table.of(starts, stops, k)
    start, size, chosen, rank, room, first_tile, first_group, first_candidate, first_index = table.rows.T
    assert (start.tolist(), size.tolist(), chosen.tolist()) == (starts.tolist(), sizes, k.tolist())
    tiles = np.diff(first_tile, append=table.tiles)
    assert (tiles * TILE >= size + 3).all()  # 3: a tile may begin up to 3 elements before the segment
    assert ((tiles - 1) * TILE < size + 3).all()
    groups = np.diff(first_group, append=table.groups)
    assert (groups == (tiles + GROUP - 1) // GROUP).all()
    assert np.diff(first_candidate, append=table.candidates).tolist() == room.tolist()
    assert np.diff(first_index, append=table.indices).tolist() == k.tolist()
    assert first_tile[0] == first_group[0] == first_candidate[0] == first_index[0] == 0
    assert (rank[room == 0] == 0).all()
    assert (room[rank > 0] > k[rank > 0]).all()
    assert table.candidates <= stops[-1] / 2


def test_small_segments_and_those_of_which_much_is_chosen_need_no_sample():
    rank, room = threshold_of(np.array([1, 2 * SAMPLE - 1, 10**6, 10**6]), np.array([1, 1, 5 * 10**5, 10**6]))
    assert rank.tolist() == room.tolist() == [0, 0, 0, 0]
    rank, room = threshold_of(np.array([2 * SAMPLE, 10**6, 10**6]), np.array([0, 1, 10**5]))
    assert (rank > 0).all()
    assert (room > 0).all()


def test_a_sample_seldom_misjudges():
    """None of a thousand samples gives fewer than k candidates, or more than there is room for."""
    rng = np.random.default_rng(0)
    for size, k in [(10**6, 10), (10**6, 1000), (25 * 10**6, 250_000), (10**6, 200_000)]:
        [rank], [room] = threshold_of(np.array([size]), np.array([k]))
        above = rng.beta(rank, SAMPLE - rank + 1, 1000) * size  # the number above a sample's rank-th
        assert above.min() > k
        assert above.max() < room


# The library


def test_it_tells_what_serves(library):
    assert str(library) == "cuda, libhpcsgd_cuda.so"


def test_memory_grows_with_what_there_is(library):
    def largest_bytes(*sizes: int) -> int:
        return library.functions.hpcsgd_cuda_largest_bytes(*sizes)

    assert largest_bytes(0, 0, 0, 0) == 0
    assert largest_bytes(1, 1, 1, 0) >= 2048 * 8
    assert largest_bytes(1, 1, 1, 10**10) - largest_bytes(1, 1, 1, 0) == pytest.approx(6 * 10**10, abs=512)
    assert library.functions.hpcsgd_cuda_above_bytes(10**10) == pytest.approx(10**10 / 8, rel=0.01)
    assert library.functions.hpcsgd_cuda_accumulate_bytes(10**10) == 8 * 10**10


@pytest.mark.parametrize("n", [SAMPLE, SAMPLE + 1, 200_001, 10**11])
def test_the_sample_covers_the_segment(library, n):
    chosen = sample(library, n)
    edges = np.arange(SAMPLE + 1) * n // SAMPLE
    assert (edges[:-1] <= chosen).all()
    assert (chosen < edges[1:]).all()


def test_the_sample_has_no_period(library):
    for period in (2, 64, 1024):
        counts = np.bincount(sample(library, SAMPLE * 4096) % period, minlength=period)
        assert abs(counts - SAMPLE / period).max() < 6 * (SAMPLE / period) ** 0.5


def test_without_a_library_it_is_said_once(fresh, monkeypatch, caplog, tmp_path):
    class Missing:
        @staticmethod
        def load() -> Cuda:
            return Cuda.load(tmp_path / "none.so")

    monkeypatch.setattr(kernels, "Cuda", Missing)
    for _ in range(2):
        assert kernels.cuda(GPU) is None
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "no native kernels on cuda:0" in record.message
    assert "none.so" in record.message


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_none_serves_and_the_reason_is_reported(library, fresh, caplog):
    assert kernels.cuda(GPU) is None
    assert "libhpcsgd_cuda.so cannot be used on cuda:0: " in caplog.text


def test_a_library_of_another_version_is_refused(library, monkeypatch):
    module = importlib.import_module("hpcsgd.kernels.cuda")  # the package has a function of this name
    monkeypatch.setattr(module, "TILE", TILE // 2)
    with pytest.raises(OSError, match="another version"):
        Cuda.load(library.path)
    monkeypatch.undo()
    monkeypatch.setitem(module._BYTES, "of_tomorrow", [])
    with pytest.raises(OSError, match="another version"):
        Cuda.load(library.path)


def test_a_tensor_goes_to_the_library_of_its_device(monkeypatch):
    """Stand-ins for tensors are enough to see which library is chosen, so that no GPU is needed."""

    class Tensor:
        dtype, device, is_cpu, is_cuda = torch.float32, GPU, False, True

        def __init__(self, contiguous: bool) -> None:
            self.is_contiguous = lambda: contiguous

    monkeypatch.setattr(kernels, "cuda", lambda device: f"cuda on {device}")
    assert kernels._serving(Tensor(True)) == "cuda on cuda:0"  # pyright: ignore[reportArgumentType]
    assert kernels._serving(Tensor(False)) is None  # pyright: ignore[reportArgumentType]


def test_what_is_packed_goes_to_the_library_of_its_device(monkeypatch):
    """The reference, in torch, packs int2 on a GPU, and everything on devices without a library."""

    class Tensor:
        dtype, device, is_cpu, is_cuda = torch.float32, GPU, False, True

        @staticmethod
        def is_contiguous() -> bool:
            return True

    x: Any = Tensor()
    monkeypatch.setattr(kernels, "cuda", lambda device: f"cuda on {device}")
    assert [kernels._packing(x, x, bits) for bits in (8, 4, 2)] == ["cuda on cuda:0", "cuda on cuda:0", None]
    assert kernels._packing(torch.empty(3, device="meta"), torch.empty(3, device="meta"), 8) is None


# Largest


@everything
def test_small_arrays(place, maker):
    """Sizes are near those of a vector, of a row and of a tile."""
    rng = np.random.default_rng(1)
    for n in place.some(
        [*range(1, 70), 127, 128, 129, 1023, 1024, 1025, *(TILE + i for i in (-3, -1, 0, 1, 5))]
    ):
        k = int(rng.integers(0, n + 1))
        check_largest(place, made(maker, rng, n), *lists([0], [n], [k]), shift=n % 5)


@everything
def test_arrays_with_a_sample(place, maker):
    rng = np.random.default_rng(2)
    group = GROUP * TILE
    for n, k in place.some(
        [(20_011, 1), (70_001, 700), (group - 3, 30), (group, 3000), (3 * group + 77, 4000)]
    ):
        check_largest(place, made(maker, rng, n), *lists([0], [n], [k]), shift=k % 4)


@everything
def test_several_segments(place, maker):
    rng = np.random.default_rng(3)
    for segments in (2, 7, 300 // place.one_of):
        n = int(rng.integers(1, 600_000 // place.one_of))
        check_largest(place, made(maker, rng, n), *cuts(rng, n, segments), shift=segments % 4)


def test_a_model_of_many_layers(place):
    rng = np.random.default_rng(4)
    sizes = (2.0 ** rng.uniform(6, 21, 100 // place.one_of)).astype(int)
    stops = np.cumsum(sizes)
    k = np.maximum(1, sizes // 1000)
    x = made(normal, rng, int(stops[-1]))
    check_largest(place, x, *lists((stops - sizes).tolist(), stops.tolist(), k.tolist()))


@pytest.mark.parametrize("factor", [1e3, 1e-3], ids=["too few", "too many"])
def test_a_sample_that_deceives(place, factor):
    """The sampled elements are much larger or smaller than the others: their threshold is useless."""
    n, k = 3 * GROUP * TILE + 5, 2000
    x = made(normal, np.random.default_rng(5), n)
    x[sample(place.library, n)] *= factor
    check_largest(place, x, *lists([0], [n], [k]))
    x = torch.cat([made(normal, np.random.default_rng(6), n), x])  # and a normal segment before it
    check_largest(place, x, *lists([0, n], [n, 2 * n], [k, k]))


def test_candidates_are_what_reaches_the_samples_threshold(place):
    for n, k in [(20_011, 1), (70_001, 700), (GROUP * TILE, 3000)]:
        check_threshold(place, made(normal, np.random.default_rng(n), n), k)


@thoroughly
@pytest.mark.timeout(900)
def test_more_groups_and_tiles_than_a_block_has_threads(place):
    """Counts of groups and tiles are added up in several rounds; the k-th largest is one of many zeros."""
    n = 513 * GROUP * TILE + 5
    x = torch.zeros(n)
    places = torch.arange(7, n, 1_000_003)
    x[places] = -1
    expected = torch.cat([torch.arange(7), places]).sort().values
    there = place.put(x, 1)
    assert torch.equal(place.library.largest(there, *lists([0], [n], [len(expected)])).cpu(), expected)
    assert torch.equal(place.library.above(there, 0.5).cpu(), places)


@gpu
def test_more_than_32_bits_of_bytes(cuda):
    n = 2**30 + 12_345
    x = torch.zeros(n, device=GPU)
    places = torch.tensor([0, 5, 2**29, 2**30 - 1, n - 1])
    x[places.to(GPU)] = -1
    assert cuda.largest(x, *lists([0], [n], [5])).tolist() == places.tolist()
    assert cuda.above(x, 0.5).tolist() == places.tolist()


@gpu
def test_another_stream(cuda):
    """Kernels run on torch's current stream, after the work that is already on it."""
    n = 10**7
    for _ in range(5):
        x = torch.zeros(n, device=GPU)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(30):
                x.add_(0.0)
            x[n // 2] = 3.0
            found = cuda.largest(x, *lists([0], [n], [1]))
            norms = cuda.accumulate(x, torch.ones_like(x), lists([0, n])[0])
        torch.cuda.synchronize()
        assert found.tolist() == [n // 2]
        assert norms.item() == n - 1 + 16


# Above


@pytest.mark.parametrize("n", [0, 1, 31, 33, TILE, TILE + 1, 70_001, 2**21 + 35])
@pytest.mark.parametrize("threshold", [-1.0, 0, 1.0, 3.5], ids=str)
def test_what_reaches_a_threshold(place, n, threshold):
    x = made(normal, np.random.default_rng(n), n)
    if n > 40:
        x[[7, 30, n - 1]] = torch.tensor([torch.nan, -torch.inf, 0.0])
    for shift in place.some(range(4)):
        check_above(place, x, threshold, shift)


# Accumulate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("M", [0, 1, 7, TILE - 1, TILE, TILE + 1, 70_001, 2**20 + 13])
def test_accumulate(place, dtype, M):
    rng = np.random.default_rng(M)
    acc, g = (torch.from_numpy(rng.standard_normal(M, np.float32)) for _ in range(2))
    starts = torch.tensor([0, 0, *np.sort(rng.integers(0, M + 1, 5)), M, M])
    for shifts in place.some([(0, 0), (1, 1), (0, 1), (3, 2)]):
        check_accumulate(place, acc, g.to(dtype), starts, shifts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_number_of_16_bits(place, dtype):
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    expected = numbers.float() + 0.0
    acc = torch.zeros(2**16, device=place.device)
    place.library.accumulate(acc, place.put(numbers, 0), torch.tensor([0, 2**16]))
    assert torch.equal(acc.cpu().nan_to_num(7.5), expected.nan_to_num(7.5))
    assert torch.equal(acc.cpu().isnan(), expected.isnan())


# Packing


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("block", [8, 24, 64, 256, 1000, 1032])
@pytest.mark.parametrize("draw", [None, 0, 2**32 - 1])
def test_packing(place, bits, block, draw):
    """Elements include zeros, subnormal and large numbers; blocks with NaN or infinity become NaN."""
    for n in place.some([1, 2, 7, 8, 9, 63, 257, 1031, 4099, 70_001]):
        x = elements(n)
        if n > 100:
            x[5], x[70], x[90] = torch.nan, torch.inf, -torch.inf
        check_pack(place, x, block, bits, draw, (n % 4, n % 3))


@pytest.mark.parametrize("bits", [8, 4])
def test_packing_numbers_half_way(place, bits):
    check_pack(place, halves(1000), 8, bits, None)


@gpu
def test_the_package_serves_tensors_of_a_gpu(cuda, monkeypatch):
    def refuse(*_: object) -> None:
        raise AssertionError("the reference was called")

    for name in ("accumulate", "largest", "above", "pack", "unpack"):
        monkeypatch.setattr(f"hpcsgd.kernels.reference.{name}", refuse)
    x = torch.tensor([1.0, -3, 2], device=GPU)
    assert kernels.largest(x, *lists([0], [3], [2])).tolist() == [1, 2]
    assert kernels.above(x, 2).tolist() == [1, 2]
    assert kernels.accumulate(x, torch.ones_like(x), torch.tensor([0, 3])).tolist() == [17]
    code = torch.zeros(kernels.packed_bytes(3, 8, 8), dtype=torch.uint8, device=GPU)
    kernels.pack(torch.tensor([127.0, -3, 2], device=GPU), code, 8, 8)
    kernels.unpack(code, x, 8, 8)
    assert x.tolist() == [127, -3, 2]
    with pytest.raises(UserError, match="NaN"):
        kernels.above(x, float("nan"))
