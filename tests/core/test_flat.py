"""Tests of flat vectors: every parameter is a view with its own strides, and has one owner."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hpcsgd.core.flat import Bucket, flatten
from hpcsgd.errors import UserError

shapes = st.lists(st.integers(0, 5), min_size=0, max_size=3).map(tuple)
parameters = st.lists(
    st.tuples(shapes, st.sampled_from([torch.float32, torch.float64, torch.bfloat16])), min_size=1, max_size=8
)


def made(kinds: list[tuple[tuple[int, ...], torch.dtype]]) -> list[tuple[str, nn.Parameter]]:
    values = [torch.arange(1, 1 + torch.Size(shape).numel()).view(shape).to(dtype) for shape, dtype in kinds]
    return [(f"p{i}", nn.Parameter(value)) for i, value in enumerate(values)]


@given(parameters, st.integers(1, 5), st.sampled_from([0.0, 16.0, 100.0, 1e9]))
def test_positions_own_every_element_once(
    kinds: list[tuple[tuple[int, ...], torch.dtype]], K: int, bucket_bytes: float
) -> None:
    owned: dict[str, list[int]] = {}
    for j in range(K):
        named = made(kinds)
        before = [param.detach().clone() for _, param in named]
        for bucket in flatten(named, K, j, bucket_bytes):
            assert bucket.size % K == 0
            assert bucket.param_shard.numel() == bucket.size // K
            for piece in bucket.ranges:
                owned.setdefault(piece.slot.name, []).extend(range(piece.start, piece.stop))
                mine = bucket.param_shard[piece.offset : piece.offset + piece.stop - piece.start]
                assert torch.equal(mine, piece.slot.param.detach().reshape(-1)[piece.start : piece.stop])
        assert all(torch.equal(x, p.detach()) for x, (_, p) in zip(before, named, strict=True))
    for name, param in made(kinds):
        assert sorted(owned.get(name, [])) == list(range(param.numel()))


@given(parameters, st.integers(1, 4), st.sampled_from([0.0, 50.0, 1e9]))
def test_buckets_hold_one_dtype_and_run_backwards(
    kinds: list[tuple[tuple[int, ...], torch.dtype]], K: int, bucket_bytes: float
) -> None:
    for bucket in flatten(made(kinds), K, 0, bucket_bytes):
        assert {slot.param.dtype for slot in bucket.slots} == {bucket.w.dtype}
        numbers = [int(slot.name[1:]) for slot in bucket.slots]
        assert numbers == sorted(numbers, reverse=True)


def one_bucket(*params: nn.Parameter, K: int = 1) -> Bucket:
    (bucket,) = flatten([(f"p{i}", p) for i, p in enumerate(params)], K, 0, 1e9)
    return bucket


def test_parameters_are_views() -> None:
    p = nn.Parameter(torch.ones(3, 2))
    bucket = one_bucket(p)
    bucket.w.mul_(5)
    assert torch.equal(p.detach(), torch.full((3, 2), 5.0))


def test_strides_are_kept() -> None:
    p = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    stride, value = p.stride(), p.detach().clone()
    bucket = one_bucket(p)
    assert p.stride() == stride
    assert torch.equal(p.detach(), value)
    p.square().sum().backward()
    bucket.gather()
    assert p.grad is not None
    assert p.grad.stride() == stride
    assert torch.equal(p.grad, 2 * value)


def test_layouts_that_cannot_be_kept_are_refused() -> None:
    expanded = nn.Parameter(torch.ones(1).expand(4))
    with pytest.raises(UserError, match="p0 of strides"):
        one_bucket(expanded)
    with pytest.raises(UserError, match="layout"):
        one_bucket(nn.Parameter(torch.eye(2).to_sparse()))


def test_gathering_keeps_gradients_and_zeroes_missing_ones() -> None:
    used = nn.Parameter(torch.ones(2))
    unused = nn.Parameter(torch.ones(3))
    bucket = one_bucket(used, unused)
    (3 * used).sum().backward()
    bucket.gather()
    assert torch.equal(bucket.g, torch.tensor([0.0, 0, 0, 3, 3]))
    used.grad, unused.grad = None, torch.ones(3)
    bucket.gather()
    assert torch.equal(bucket.g, torch.tensor([1.0, 1, 1, 0, 0]))
    assert unused.grad is not None
    assert unused.grad.data_ptr() == bucket.g.data_ptr()


def gradient(param: nn.Parameter) -> list[float] | None:
    return None if param.grad is None else param.grad.tolist()


def test_a_missing_gradient_is_there_once_it_is_given_a_value() -> None:
    used = nn.Parameter(torch.ones(2))
    unused = nn.Parameter(torch.ones(3))
    bucket = one_bucket(used, unused)
    (3 * used).sum().backward()
    bucket.gather()
    bucket.show_found()
    assert gradient(unused) is None
    bucket.gather()
    bucket.g.fill_(2)
    bucket.show_found()
    assert gradient(unused) == [2.0] * 3
    unused.grad = None
    bucket.show_found()
    assert gradient(unused) is None


def test_whether_a_gradient_has_values_is_no_use_of_it() -> None:
    p = nn.Parameter(torch.ones(4))
    bucket = one_bucket(p)
    p.sum().backward()
    bucket.gather()
    (slot,) = bucket.slots
    slot.on_use(lambda: lambda: pytest.fail("used"))
    slot.pend()
    assert slot.any()
    assert slot.pending


def test_only_foreign_writes_grow_the_version() -> None:
    p = nn.Parameter(torch.ones(4))
    bucket = one_bucket(p, K=2)
    p.sum().backward()
    bucket.gather()
    before = bucket.version()
    bucket.g.mul_(2)
    bucket.grad_shard.add_(1)
    assert bucket.version() == before
    assert p.grad is not None
    p.grad.mul_(0.5)
    assert bucket.version() > before


FULL = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.19 GiB of which "
    "1.06 MiB is free. Including non-PyTorch memory, this process has 79.18 GiB memory in use. If ..."
)
"""An error message as torch writes it."""


def no_room(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError(FULL)


TOLD = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.19 GiB of which "
    "1.06 MiB is free; less is needed with a smaller batch"
)


def test_a_bucket_that_does_not_fit_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = one_bucket(nn.Parameter(torch.ones(6)), K=2)
    monkeypatch.setattr(torch, "zeros", no_room)
    with pytest.raises(UserError, match=r"^no room for 6 parameters on cpu: ") as told:
        one_bucket(nn.Parameter(torch.ones(6)), K=2)
    assert TOLD in str(told.value)
    assert "Including" not in str(told.value)
    monkeypatch.setattr(torch, "zeros_like", no_room)
    with pytest.raises(UserError, match=r"^no room for 6 gradients on cpu: "):
        bucket.allocate()
