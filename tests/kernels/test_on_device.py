"""Kernels made of torch's own operations, for devices without native kernels, against the reference."""

from __future__ import annotations

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from arrays import MAKERS, cuts, lists, made
from hpcsgd import kernels
from hpcsgd.kernels import on_device, reference

TOP = 2**63 - 1
AMD = torch.device("cuda", 0)


@pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker.__name__)
def test_the_largest(maker):
    rng = np.random.default_rng(1)
    for n in [1, 2, 31, 70, 1000, 8193]:
        x = made(maker, rng, n)
        segments = lists([0], [n], [int(rng.integers(0, n + 1))])
        assert torch.equal(on_device.largest(x, *segments), reference.largest(x, *segments))
    for segments in (2, 30):
        x, of = made(maker, rng, 5000), cuts(rng, 5000, segments)
        assert torch.equal(on_device.largest(x, *of), reference.largest(x, *of))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_largest_of_16_bits(dtype):
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    for k in (1, 700, 2**15, 2**16):
        segments = lists([0], [2**16], [k])
        assert torch.equal(on_device.largest(numbers, *segments), reference.largest(numbers, *segments))


def test_nothing_is_the_largest_of_nothing():
    assert on_device.largest(torch.empty(0), *lists([], [], [])).tolist() == []
    assert on_device.largest(torch.ones(3), *lists([0, 2], [2, 3], [0, 0])).tolist() == []


@hypothesis.given(
    gaps=st.lists(st.integers(0, 62).flatmap(lambda bits: st.integers(0, 2**bits)), max_size=60),
    room=st.integers(1, 2**40),
)
def test_the_code(gaps, room):
    """The code does not depend on whether the bound of the indices is known."""
    sums = np.cumsum(np.array(gaps, object) + 1) - 1 if gaps else []
    indices = torch.tensor([int(index) for index in sums if index <= TOP], dtype=torch.int64)
    bound = min(TOP + 1, int(indices[-1]) + room) if indices.numel() else room
    expected = reference.encode(indices)
    for each in (bound, TOP + 1):
        assert torch.equal(on_device.encode(indices, each), expected)
    assert torch.equal(on_device.decode(expected, len(indices)), indices)


def test_indices_up_to_the_bound():
    for bound in (1, 2, 128, 129, 2**14, 2**14 + 1, 2**35, TOP + 1):
        indices = torch.tensor([bound - 1])
        code = on_device.encode(indices, bound)
        assert torch.equal(code, reference.encode(indices))
        assert on_device.decode(code, 1).tolist() == [bound - 1]


def test_tensors_elsewhere_are_served_by_them():
    elsewhere = torch.empty(3, device="meta")
    assert kernels._in_torch(elsewhere) is on_device
    assert kernels._in_torch(elsewhere.double()) is reference
    assert kernels._in_torch(torch.empty(3)) is reference


@pytest.mark.parametrize("device", [AMD, torch.device("xpu", 0)], ids=str)
def test_what_nvidia_alone_has_does_not_run_on_other_gpus(device, monkeypatch, caplog):
    class Refused:
        @staticmethod
        def load() -> None:
            raise AssertionError("the library was loaded")

    monkeypatch.setattr(kernels, "Cuda", Refused)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    kernels.cuda.cache_clear()
    try:
        assert kernels.cuda(device) is kernels.cuda(device) is None
    finally:
        kernels.cuda.cache_clear()
    [record] = caplog.records
    assert (
        record.getMessage()
        == f"torch.topk selects gradients on {device}: native kernels are for NVIDIA's GPUs"
    )
