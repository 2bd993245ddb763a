from __future__ import annotations

from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hpcsgd.checkpoint import tree
from hpcsgd.errors import UserError
from hpcsgd.files.hdf5 import new_file


def there_and_back(value: tree.Tree, path: Path) -> Any:
    with new_file(path) as file:
        tree.write(file, value)
    with h5py.File(path) as file:
        return tree.read(file)


def stored_bytes(x: Tensor) -> bytes:
    return bytes(x.clone(memory_format=torch.contiguous_format).untyped_storage())


def assert_same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, Tensor):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert stored_bytes(a) == stored_bytes(b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        assert [type(key) for key in a] == [type(key) for key in b]
        for key, value in a.items():
            assert_same(value, b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert repr(a) == repr(b)  # a NaN too


TENSORS = {
    "float32": torch.randn(3, 4),
    "float64": torch.randn(2, 1, 3, dtype=torch.float64),
    "float16": torch.randn(5).half(),
    "bfloat16": torch.randn(2, 3).bfloat16(),
    "float8": torch.randn(6).to(torch.float8_e5m2),
    "int64": torch.tensor([-(2**62), 2**62]),
    "uint8": torch.arange(7, dtype=torch.uint8),
    "bool": torch.tensor([[True, False], [False, True]]),
    "complex": torch.randn(3, dtype=torch.complex64),
    "nan and infinity": torch.tensor([float("nan"), float("inf"), -0.0]),
    "one number": torch.tensor(3.5),
    "one bfloat16": torch.tensor(3.5).bfloat16(),
    "one bool": torch.tensor(True),
    "empty": torch.empty(0, 3),
    "empty bfloat16": torch.empty(0, dtype=torch.bfloat16),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": torch.randn(3, 4).t(),
    "part of another": torch.randn(10)[3:6],
    "large": torch.randn(300_000),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_come_back(tmp_path: Path, name: str) -> None:
    assert_same(there_and_back({"x": TENSORS[name]}, tmp_path / "f"), {"x": TENSORS[name]})


VALUES: dict[str, Any] = {
    "plain": {"a": 1, "b": 2.5, "c": "text", "d": True, "e": None, "nul": "a\0b", "text": "Σ"},
    "numbers json does not know": {"inf": float("inf"), "nan": float("nan"), "big": 2**70},
    "int keys": {0: "int", "0": "str", -3: {7: 8}},
    "keys with slashes and dots": {"layer/weight": 1, "/": 2, ".": 3, "": 4, "Σ": 5},
    "lists": {"x": [1, [2, [3, None]], []], "y": [{"a": [torch.ones(2)]}, {}]},
    "tuples": {"betas": (0.9, 0.999), "x": [(1, 2)], "y": (torch.ones(1), ({}, ()))},
    "counters": {"milestones": Counter({30: 1, 10: 2}), "more": [Counter({3: 1})]},
    "nothing": {},
    "many long keys": {f"a.module.with.a.long.path.{i:05d}.of.the.model": i for i in range(1500)},
}


@pytest.mark.parametrize("name", VALUES)
def test_values_come_back(tmp_path: Path, name: str) -> None:
    assert_same(there_and_back(VALUES[name], tmp_path / "f"), VALUES[name])


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec="utf-8"))
KEYS = st.text(st.characters(codec="utf-8"), max_size=5) | st.integers(-9, 9)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3) | st.tuples(inner, inner)
    ),
    max_leaves=8,
)


@pytest.mark.slow
@given(value=st.dictionaries(KEYS, TREES, max_size=4))
def test_any_tree_comes_back(tmp_path_factory: pytest.TempPathFactory, value: tree.Tree) -> None:
    assert_same(there_and_back(value, tmp_path_factory.mktemp("tree") / "f"), value)


def test_other_dicts_become_plain_ones(tmp_path: Path) -> None:
    assert_same(there_and_back({"x": OrderedDict(a=1)}, tmp_path / "f"), {"x": {"a": 1}})


@pytest.mark.parametrize(("value", "message"), [
    ({"scale": len}, "scale: a builtin_function_or_method cannot be saved in a checkpoint"),
    ({"a": [1, {2}]}, "1: a set cannot be saved"),
    ({(1, 2): 3}, "a tuple cannot be a key"),
])  # fmt: skip
def test_what_cannot_be_stored_is_named(tmp_path: Path, value: tree.Tree, message: str) -> None:
    with pytest.raises(UserError, match=message):
        there_and_back(value, tmp_path / "f")


def test_a_slice_is_read_alone(tmp_path: Path) -> None:
    x = torch.randn(1000).bfloat16()
    with new_file(tmp_path / "f") as file:
        tree.write(file, {"x": x})
    with h5py.File(tmp_path / "f") as file:
        assert torch.equal(tree.read_slice(tree.items(file)["x"], 990, 997), x[990:997])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_a_flipped_byte_of_a_tensor_is_not_read(tmp_path: Path, dtype: torch.dtype) -> None:
    path = tmp_path / "f"
    x = (torch.arange(64) % 3).to(dtype)
    with new_file(path) as file:
        tree.write(file, {"x": x})
    stored = bytearray(path.read_bytes())
    at = stored.find(x.view(torch.uint8).numpy().tobytes())
    stored[at + 5] ^= 1
    path.write_bytes(stored)
    with h5py.File(path) as file, pytest.raises(OSError, match="filter returned failure"):
        tree.read(file)
