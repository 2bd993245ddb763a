"""The items that a script saves in addition to optimizers: objects with a state, generators, values."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from copy import copy
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from hpcsgd.checkpoint.tree import digest
from hpcsgd.comm.on_host import on_host
from hpcsgd.core.buffers import is_averaged, widened
from hpcsgd.engine.optimizer import DistributedOptimizer
from hpcsgd.engine.wrapping import OuterWrapper
from hpcsgd.errors import UserError, located

STATE, GENERATOR, VALUE = "an object with a state_dict", "a random generator", "a value"
"""The three kinds of items, as text for errors."""
Generator = torch.Generator | np.random.Generator | random.Random


@runtime_checkable
class _Stateful(Protocol):
    """An object that can return and load its state; the same protocol is in torch.distributed.checkpoint."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any) -> Any: ...


def kind_of(item: object) -> str:
    """Return which of `STATE`, `GENERATOR` and `VALUE` the item is."""
    if isinstance(item, Generator):
        return GENERATOR
    return STATE if isinstance(item, _Stateful) and not isinstance(item, type) else VALUE


def classes_of(item: object) -> list[str]:
    """Return the names of the item's class and its base classes, without the names of their modules.

    The class of a script belongs to another module if the script is imported. All subclasses of `nn.Module`
    count as one class, because they check the state that they load.
    """
    if isinstance(item, Generator):
        kinds: list[Any] = [torch.Generator, np.random.Generator, random.Random]
        return next(
            [f"{each.__module__.split('.')[0]} Generator"] for each in kinds if isinstance(item, each)
        )
    if isinstance(item, nn.Module):
        return [nn.Module.__qualname__]
    return [each.__qualname__ for each in type(item).__mro__[:-1]]


def require_beside(items: Mapping[str, object], optimizers: Iterable[DistributedOptimizer]) -> None:
    """Raise `UserError` for an item that must not be given by name.

    These are the model and the plain optimizer inside one of `optimizers`, which are saved with it, and items
    that are a `DistributedOptimizer` or an `OuterWrapper` themselves.
    """
    with_them = [whole for each in optimizers for whole in (each.model, each.local.optimizer)]
    for name, item in items.items():
        if any(item is whole for whole in with_them):
            raise UserError(f"{name} is saved with its DistributedOptimizer: leave {name}= out")
        if isinstance(item, DistributedOptimizer | OuterWrapper):
            raise UserError(f"{name}: give the {type(item).__name__} after the folder, without a name")


def state_of(item: Any) -> Any:
    """Return the state or value of the item, as it is to be saved, on the host."""
    match item:
        case torch.Generator():
            state: Any = item.get_state()
        case np.random.Generator():
            state = dict(item.bit_generator.state)
        case random.SystemRandom():
            raise UserError("a SystemRandom has no state that could be saved: give a random.Random")
        case random.Random():
            version, numbers, gauss = item.getstate()
            state = [version, list(numbers), gauss]
        case _Stateful() if not isinstance(item, type):
            state = item.state_dict()
        case _:
            state = item
    try:
        return on_host(state)
    except RecursionError:
        raise UserError("it contains itself, or is nested too deeply, and cannot be saved") from None


def load(item: Any, state: Any, place: str) -> None:
    """Restore the object or generator `item` from `state`, which `state_of` returned.

    Raises:
        UserError: If torch, NumPy or Python says that the state does not fit; the error names the `place`.
            Exceptions of a script's own class are passed on with a note.
    """
    try:
        with located(place):
            _load(item, state)
    except UserError:
        raise
    except Exception as error:
        whose = getattr(getattr(item, "load_state_dict", None), "__module__", "torch")
        if whose.partition(".")[0] != "torch":
            error.add_note(f"{place} was put back into a {type(item).__name__}")
            raise
        raise UserError(
            f"{place} does not fit into the {type(item).__name__} that load() was given: "
            f"{type(error).__name__}: {error}"
        ) from error


def _load(item: Any, state: Any) -> None:
    match item:
        case torch.Generator():
            item.set_state(state)
        case np.random.Generator():
            item.bit_generator.state = state
        case random.Random():
            version, numbers, gauss = state
            item.setstate((version, tuple(numbers), gauss))
        case _:
            item.load_state_dict(state)


class Mean:
    """The mean of the states that the ranks have saved for one item. States are added one by one.

    Only dense tensors of floating-point and complex numbers are averaged, as in buffers of a model. All other
    parts of the states must be equal on all ranks: keys, lengths, shapes, other tensors and plain values.
    """

    def __init__(self, name: str) -> None:
        self._name, self._count, self._total = name, 0, None

    def add(self, state: Any) -> None:
        """Add the state that one rank has saved.

        Raises `UserError` if it differs from earlier states in a part that must be equal on all ranks. That
        is every part except the elements of floating-point and complex tensors.
        """
        self._total = _widened(state) if self._count == 0 else self._sum(self._total, state)
        self._count += 1
        if self._count == 1:
            self._first = state

    def result(self) -> Any:
        """Return the mean of the added states, with the containers and dtypes of the first one."""
        return self._divided(self._total, self._first)

    def _sum(self, total: Any, state: Any) -> Any:
        tensors = isinstance(total, Tensor) and isinstance(state, Tensor) and total.shape == state.shape
        if tensors and is_averaged(state):
            return total + widened(state)
        if isinstance(total, dict) and isinstance(state, dict) and total.keys() == state.keys():
            return {key: self._sum(value, state[key]) for key, value in total.items()}
        if isinstance(total, list | tuple) and isinstance(state, list | tuple) and len(total) == len(state):
            return [self._sum(a, b) for a, b in zip(total, state, strict=True)]
        if digest(total) == digest(state):
            return total
        raise UserError(
            f"{self._name} was not the same on all ranks that saved it, and these are other ranks: give "
            f"load() {self._name}=None to go on without it"
        )

    def _divided(self, total: Any, like: Any) -> Any:
        if isinstance(like, Tensor) and is_averaged(like):
            return (total / self._count).to(like.dtype)
        if isinstance(like, dict):
            divided = copy(like)
            for key, value in like.items():
                divided[key] = self._divided(total[key], value)
            return divided
        if isinstance(like, list | tuple):
            return type(like)([self._divided(a, b) for a, b in zip(total, like, strict=True)])
        return total


def _widened(state: Any) -> Any:
    if isinstance(state, Tensor):
        return widened(state) if is_averaged(state) else state
    if isinstance(state, dict):
        return {key: _widened(value) for key, value in state.items()}
    return [_widened(value) for value in state] if isinstance(state, list | tuple) else state
