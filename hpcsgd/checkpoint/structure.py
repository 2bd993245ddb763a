"""Convert nested containers of plain values, tensors and arrays to JSON, and back to the same values.

Strings, numbers, bools, None and lists are as in JSON. Anything else is an object with one key, which names
its type: ``{"tuple": [1, 2]}``, ``{"dict": [["key", 3]]}``. Tensors of a few bytes are in the JSON. Other
tensors are stored outside as numbered vectors, and the JSON has their numbers.
"""

from __future__ import annotations

import functools
import json
import math
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hpcsgd import torch_private
from hpcsgd.checkpoint.vectors import (
    carrier_of,
    described,
    from_bytes,
    made_array,
    made_sparse,
    parts_of_sparse,
    require_kept,
)
from hpcsgd.comm.on_host import mapped
from hpcsgd.errors import UserError

Store = Callable[[Tensor], int]
"""A function that stores a vector that NumPy can represent, and returns the vector's number."""
SHORT = 32
"""Maximum size in bytes of a tensor that is included in the JSON."""
_DICTS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_FACTORIES = {each.__name__: each for each in (bool, int, float, str, list, tuple, dict, set)}
_KEYS = (str, int, float, complex, bytes, bool, type(None), tuple, frozenset)


def encoded(value: Any, store: Store) -> str:
    """Return `value` as JSON. Tensors of more than `SHORT` bytes are passed to `store`.

    Raises:
        UserError: If a part of `value` would not be restored exactly; the error names the part.
    """
    try:
        return json.dumps(_Encoder(store).of(value), allow_nan=False, separators=(",", ":"))
    except RecursionError:
        raise UserError("it contains itself, or is nested too deeply, and cannot be saved") from None


def decoded(text: str | bytes, data: Callable[[int], Any]) -> Any:
    """Return the value that `encoded` was given, with `Unread` in place of tensors and arrays.

    `data` maps the number of a stored vector to an object whose slices can be read.
    """
    return json.loads(text, object_hook=functools.partial(_decoded, data))


def read(tree: Any) -> Any:
    """Return `tree`, or a part of it, with all tensors and arrays read."""
    return mapped(tree, lambda leaf: leaf.read() if isinstance(leaf, Unread) else leaf)


class Unread(ABC):
    """A tensor or an array in nested containers that is read on demand."""

    @abstractmethod
    def read(self) -> Any:
        """Return the value as it was saved."""


@dataclass(frozen=True)
class UnreadTensor(Unread):
    """A tensor that is not read yet. Its elements are in `data`: bytes, or a vector of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: Any

    def read(self) -> Tensor:
        """Return the whole tensor, on the CPU and contiguous."""
        return self.slice(0, math.prod(self.shape)).reshape(self.shape)

    def slice(self, start: int, stop: int) -> Tensor:
        """Return elements [start, stop), in memory order."""
        if isinstance(self.data, bytes):
            return from_bytes(self.data, self.dtype)[start:stop]
        found = torch.from_numpy(self.data[start:stop])
        return found.view(self.dtype) if carrier_of(self.dtype) else found

    def rows(self, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of a vector, or rows [start, stop) of a matrix."""
        row = self.shape[1:]
        return self.slice(start * math.prod(row), stop * math.prod(row)).reshape(-1, *row)


@dataclass(frozen=True)
class _Made(Unread):
    """A value, such as an array, that `make` computes from `parts` when it is read."""

    make: Callable[..., Any]
    parts: Any

    def read(self) -> Any:
        return self.make(*read(self.parts))


class _Encoder:
    def __init__(self, store: Store) -> None:
        self._store = store

    def of(self, value: Any) -> Any:
        """Return the JSON form of `value`."""
        kind = type(value)
        make = _PLAIN.get(kind)
        if make is not None:
            return make(value)
        if kind is list:
            return self._all(enumerate(value))
        if kind in (tuple, torch.Size):
            return {kind.__name__: self._all(enumerate(value))}
        if (metadata := torch_private.versions_of_modules(value)) is not None and kind is OrderedDict:
            return {"state_dict": [self._pairs(value), self.of(metadata)]}
        if kind in _DICTS.values():
            return {kind.__name__: self._pairs(value)}
        if kind is defaultdict and (factory := _factory_name(value)) is not None:
            return {"defaultdict": [factory, self._pairs(value)]}
        if kind in (set, frozenset):
            return {kind.__name__: sorted((self.of(each) for each in value), key=json.dumps)}
        if kind is deque:
            return {"deque": [self._all(enumerate(value)), value.maxlen]}
        if kind in (Tensor, nn.Parameter):
            return self._tensor(value)
        if kind is np.ndarray:
            return {"array": self._array(value)}
        if isinstance(value, np.generic):
            return {"scalar": self._array(np.asarray(value))}
        raise UserError(_refusal(value))

    def _all(self, items: Iterable[tuple[Any, Any]]) -> list[Any]:
        found: list[Any] = []
        for place, value in items:
            make = _PLAIN.get(type(value))
            try:
                found.append(self.of(value) if make is None else make(value))
            except UserError as error:
                raise type(error)(f"{place}: {error}") from error
        return found

    def _pairs(self, items: Mapping[Any, Any]) -> list[list[Any]]:
        keys = [self._key(key) for key in items]
        return [[key, value] for key, value in zip(keys, self._all(items.items()), strict=True)]

    def _key(self, key: Any) -> Any:
        if type(key) not in _KEYS:
            raise UserError(f"key {key!r}: a {type(key).__name__} cannot be a key in a checkpoint")
        return self.of(key)

    def _tensor(self, x: Tensor) -> dict[str, Any]:
        require_kept(x)
        if x.layout != torch.strided:
            return {"sparse": self._all(enumerate(parts_of_sparse(x.detach().cpu())))}
        plain = x.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        carrier = carrier_of(plain.dtype)
        vector = plain.view(carrier) if carrier else plain
        nbytes = vector.numel() * vector.element_size()
        kept = vector.numpy().tobytes().hex() if nbytes <= SHORT else self._store(vector)
        return {"tensor": [str(x.dtype).removeprefix("torch."), list(x.shape), kept]}

    def _array(self, x: np.ndarray[Any, Any]) -> list[Any]:
        reported = described(x.dtype)
        flat = np.ndarray(x.nbytes, np.uint8, bytearray(x.tobytes()))  # of any stride, byte order and width
        return [self.of(reported), list(x.shape), self._tensor(torch.from_numpy(flat))]


def _integer(value: int) -> Any:
    """Return the JSON form of an integer: itself up to 64 bits, because JSON readers may support no more.

    Larger integers become hexadecimal text, because Python limits decimal numbers to 4,300 digits.
    """
    return value if -(2**63) <= value < 2**63 else {"int": hex(value)}


def _float(value: float) -> Any:
    return value if math.isfinite(value) else {"float": repr(value)}


def _text(value: str) -> Any:
    """Return the JSON form of a text: itself, or code points if it has lone surrogates, as file names may.

    As text, two surrogates in a row could become one character.
    """
    half = not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value)
    return {"text": [ord(letter) for letter in value]} if half else value


_PLAIN: dict[type, Callable[[Any], Any]] = {
    bool: lambda value: value,
    type(None): lambda value: value,
    int: _integer,
    float: _float,
    str: _text,
    complex: lambda value: {"complex": [_float(value.real), _float(value.imag)]},
    bytes: lambda value: {"bytes": value.hex()},
}


def _decoded(data: Callable[[int], Any], described: dict[str, Any]) -> Any:
    (what, value), = described.items()  # fmt: skip
    match what:
        case "int":
            return int(value, 16)
        case "float":
            return float(value)
        case "text":
            return "".join(map(chr, value))
        case "bytes":
            return bytes.fromhex(value)
        case "defaultdict":
            return defaultdict(_FACTORIES.get(value[0]), value[1])
        case "state_dict":  # of a module, with the versions that tell it how to load older states
            state: Any = OrderedDict(value[0])
            torch_private.set_versions_of_modules(state, value[1])
            return state
        case "deque":
            return deque(value[0], value[1])
        case "tensor":
            dtype, shape, kept = value
            held = bytes.fromhex(kept) if isinstance(kept, str) else data(kept)
            return UnreadTensor(getattr(torch, dtype), tuple(shape), held)
        case "array":
            return _Made(made_array, value)
        case "scalar":
            return _Made(lambda *parts: made_array(*parts)[()], value)
        case "sparse":
            return _Made(made_sparse, value)
        case "complex":
            return complex(*value)
        case _:
            return _OF_LISTS[what](value)


_OF_LISTS: dict[str, Callable[[list[Any]], Any]] = {
    **_DICTS,
    "Counter": lambda pairs: Counter(dict(pairs)),
    **{each.__name__: each for each in (tuple, set, frozenset, torch.Size)},
}


def _refusal(value: object) -> str:
    kind = type(value)
    known = (str, int, float, tuple, list, dict, set, bytes, np.ndarray, Tensor)
    like = next((each for each in known if isinstance(value, each)), None)
    if isinstance(value, type):
        return f"the class {value.__name__} cannot be saved in a checkpoint"
    if isinstance(value, defaultdict):
        return "a defaultdict with a function of yours cannot be saved in a checkpoint: convert it to a dict"
    end = "" if like is None else f": convert it to a plain {like.__name__}"
    return f"a {kind.__name__} cannot be saved in a checkpoint{end}"


def _factory_name(value: defaultdict[Any, Any]) -> str | None:
    """Return the name of a defaultdict's factory: `""` if it has none, None if it cannot be saved."""
    factory: Any = value.default_factory
    if factory is None:
        return ""
    return next((name for name, known in _FACTORIES.items() if known is factory), None)
