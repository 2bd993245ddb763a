from __future__ import annotations

import numpy as np
import pytest
import torch

from hpcsgd import UserError, kernels
from hpcsgd.kernels import reference

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@pytest.mark.parametrize(
    "accumulate", [kernels.accumulate, reference.accumulate], ids=["native", "reference"]
)
@DTYPES
def test_what_it_does(accumulate, dtype):
    acc, g = torch.tensor([1.0, 2, 3, 4]), torch.tensor([0.5, -2, 1, 0]).to(dtype)
    norms = accumulate(acc, g, torch.tensor([0, 2, 2, 4]))
    assert acc.tolist() == [1.5, 0, 4, 4]
    assert g.tolist() == [0, 0, 0, 0]
    assert norms.dtype == torch.float64
    assert norms.tolist() == [2.25, 0, 32]


def test_float64():
    acc, g = torch.ones(3, dtype=torch.float64), torch.full((3,), 1e-12, dtype=torch.float64)
    kernels.accumulate(acc, g, torch.tensor([0, 3]))
    assert acc.tolist() == [1 + 1e-12] * 3


@pytest.mark.parametrize(
    ("acc", "g"),
    [(torch.float32, torch.float64), (torch.float16, torch.float16), (torch.float64, torch.float32)],
)
def test_dtypes_that_do_not_go_together(acc, g):
    with pytest.raises(UserError, match="allowed"):
        kernels.accumulate(torch.ones(2, dtype=acc), torch.ones(2, dtype=g), torch.tensor([0, 2]))


@pytest.mark.parametrize("starts", [[0, 3], [1, 4], [0, 3, 2, 4], []])
def test_segments_that_do_not_cover_are_our_mistake(starts):
    with pytest.raises(AssertionError):
        kernels.accumulate(torch.ones(4), torch.ones(4), torch.tensor(starts, dtype=torch.int64))


@DTYPES
@pytest.mark.parametrize("M", [0, 1, 7, 8, 9, 4095, 4096, 4097, 70_001, 2**20 + 13])
def test_as_the_reference(everywhere, dtype, M):
    """The sums equal the reference to the bit; the norms are close to it and reproducible."""
    rng = np.random.default_rng(M)
    acc, g = (torch.from_numpy(rng.standard_normal(M + 1, np.float32))[1:] for _ in range(2))
    g = torch.cat([torch.zeros(3, dtype=dtype), g.to(dtype)])[3:]
    starts = torch.tensor([0, 0, *np.sort(rng.integers(0, M + 1, 5)), M, M])
    sums, taken = acc.clone(), g.clone()
    expected = reference.accumulate(sums, taken, starts)

    def call(library: kernels.Native) -> torch.Tensor:
        own, theirs = acc.clone(), g.clone()
        norms = library.accumulate(own, theirs, starts)
        assert torch.equal(own, sums)
        assert not theirs.view(torch.int16 if dtype.itemsize == 2 else torch.int32).any()  # no -0 either
        return norms

    found = everywhere(call)
    torch.testing.assert_close(found[0], expected, rtol=1e-13, atol=0)
    assert all(torch.equal(norms, found[0]) for norms in found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_number_of_16_bits(everywhere, dtype):
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)

    def call(library: kernels.Native) -> torch.Tensor:
        acc = torch.zeros(2**16)
        library.accumulate(acc, numbers.clone(), torch.tensor([0, 2**16]))
        return acc

    expected = numbers.float() + 0.0
    for acc in everywhere(call, threads=(1,)):
        assert torch.equal(acc.nan_to_num(7.5), expected.nan_to_num(7.5))
        assert torch.equal(acc.isnan(), expected.isnan())


def test_a_norm_that_float32_could_not_hold(everywhere):
    acc, g = torch.full((100_000,), 1e25), torch.zeros(100_000)
    for norms in everywhere(lambda library: library.accumulate(acc, g, torch.tensor([0, 100_000]))):
        assert norms.item() == pytest.approx(1e5 * float(acc[0]) ** 2, rel=1e-12)


def test_not_a_number_is_found_by_the_norm_of_its_segment(everywhere):
    acc = torch.ones(10)
    acc[7] = torch.nan
    for norms in everywhere(
        lambda library: library.accumulate(acc, torch.zeros(10), torch.tensor([0, 5, 10]))
    ):
        assert norms[0] == 5
        assert norms[1].isnan()
