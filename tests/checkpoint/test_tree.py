from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
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


class Point(NamedTuple):
    x: int
    y: int


class Colour(IntEnum):
    RED = 1


def nested() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def stored_bytes(x: Tensor) -> bytes:
    storage = x.clone(memory_format=torch.contiguous_format).untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes()


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
    elif isinstance(a, (list, tuple, deque)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, (int, set, frozenset)):
        assert a == b
    else:
        assert repr(a) == repr(b)  # `repr` also compares NaN


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
    "other keys": {(1, "a"): 1, 0.5: 2, None: 3, True: 4, b"x": 5, frozenset([1]): 6, 2**70: 7},
    "sets": {"x": {1, "a", (2, 3)}, "y": frozenset(), "z": [{0.5}]},
    "collections": {"x": OrderedDict(b=1, a=torch.ones(9)), "y": deque([1, torch.ones(2)], 5), "z": deque()},
    "dicts with defaults": {"x": defaultdict(list, a=[1]), "y": defaultdict(None, b=2)},
    "bytes and complex": {"x": b"\0\xff", "y": complex(float("nan"), -0.0), "z": torch.Size([2, 3])},
    "halves of characters": {"x": "\ud83d\ude00", "\udc80": "y"},
    "what looks like marks": {"tuple": [1], "x": {"dict": []}, "y": [{"tensor": "00"}]},
    "a large integer": {"x": -(10**6000)},
    "many long keys": {f"a.module.with.a.long.path.{i:05d}.of.the.model": i for i in range(1500)},
}


@pytest.mark.parametrize("name", VALUES)
def test_values_come_back(tmp_path: Path, name: str) -> None:
    assert_same(there_and_back(VALUES[name], tmp_path / "f"), VALUES[name])


ARRAYS: dict[str, Any] = {
    "negative stride": np.arange(6.0)[::-1],
    "another byte order": np.arange(300, dtype=">f4"),
    "Fortran order": np.asfortranarray(np.arange(60).reshape(6, 10)),
    "broadcast": np.broadcast_to(np.arange(3.0), (2, 3)),
    "long double": np.arange(3, dtype=np.longdouble) / 3,
    "long complex": np.ones(20, dtype=np.clongdouble),
    "half": np.ones((2, 0), dtype=np.float16),
    "records": np.array([(1, "é")], dtype=[("a", ">i4"), ("b", "U3")]),
    "dates": np.array(["2020-01-01", "NaT"], dtype="M8[D]"),
    "bytes": np.array([b"a", b"bc"]),
    "one number": np.array(3.5),
    "a scalar": np.float32(0.1),
    "a bool": np.bool_(True),
    "NaN of another kind": np.array([0x7FF8000000000123], dtype=np.uint64).view(np.float64),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_come_back(tmp_path: Path, name: str) -> None:
    x = ARRAYS[name]
    found = there_and_back({"x": x}, tmp_path / "f")["x"]
    assert type(found) is type(x)
    assert (found.dtype, found.shape) == (x.dtype, x.shape)
    assert found.tobytes() == x.tobytes()
    assert np.asarray(found).dtype.byteorder == np.asarray(x).dtype.byteorder


@pytest.mark.parametrize("value", [
    [(step, 0.5) for step in range(300)], {f"key {i}": i for i in range(300)},
    {i: [torch.tensor(0.5 * i)] for i in range(300)},
], ids=["pairs", "numbers by key", "losses"])  # fmt: skip
def test_long_values_are_one_text(tmp_path: Path, value: Any) -> None:
    """One HDF5 object per value would take minutes for a long history."""
    assert_same(there_and_back({"x": value}, tmp_path / "f"), {"x": value})
    with h5py.File(tmp_path / "f") as file:
        assert len(file) == 1


@pytest.mark.parametrize(("one", "other"), [
    (1, 1.0), (True, 1), ([1], (1,)), ({1: 2}, {"1": 2}), (0.0, -0.0), ("1", 1), ({}, OrderedDict()),
    (torch.ones(2), torch.ones(2).double()), (torch.ones(2), np.ones(2, dtype=np.float32)),
    (torch.ones(40), torch.ones(40).reshape(8, 5)), (np.float64(1), 1.0), (np.arange(3), np.arange(3)[::-1]),
])  # fmt: skip
def test_what_differs_has_another_digest(one: Any, other: Any) -> None:
    assert tree.digest(one) != tree.digest(other)
    assert tree.digest([one]) == tree.digest([one])


def test_sets_have_one_digest() -> None:
    """The order of a set may differ between processes."""
    assert tree.digest({"a", "b", "c"}) == tree.digest({"c", "b", "a"})


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


@pytest.mark.parametrize(("value", "message"), [
    ({"scale": len}, "scale: a builtin_function_or_method cannot be saved in a checkpoint"),
    ({"a": [1, Path("x")]}, "a: 1: a PosixPath cannot be saved"),
    ({torch.ones(1): 3}, "a Tensor cannot be a key"),
    ({"x": int}, "x: the class int cannot be saved"),
    ({"x": np.ma.array([1, 2], mask=[False, True])}, "x: a MaskedArray .* convert it to a plain ndarray"),
    ({"x": np.array([{}])}, "x: an array of object .* convert it to numbers"),
    ({"x": (Point(1, 2),)}, "x: 0: a Point .* convert it to a plain tuple"),
    ({"x": Colour.RED}, "x: a Colour .* convert it to a plain int"),
    ({"x": defaultdict(lambda: 1)}, "x: a defaultdict with a function of yours"),
    ({"x": torch.ones(2, device="meta")}, "x: a tensor on the meta device has no values"),
    ({"x": nested()}, "it contains itself, or is nested too deeply"),
])  # fmt: skip
def test_what_cannot_be_stored_is_named(tmp_path: Path, value: tree.Tree, message: str) -> None:
    with pytest.raises(UserError, match=message):
        there_and_back(value, tmp_path / "f")


def test_a_nested_tensor_cannot_be_stored(tmp_path: Path) -> None:
    ragged = torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)  # imports torch's compiler
    with pytest.raises(UserError, match="x: a NestedTensor cannot be"):
        there_and_back({"x": ragged}, tmp_path / "f")


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
