"""Optimizers that another one has inside, as SAM its base optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType
from typing import Any, cast

from torch import optim


def optimizers_in(optimizer: optim.Optimizer) -> list[optim.Optimizer]:
    """Return `optimizer`, and all that it, or one of these, has as an attribute or in a list."""
    found = [optimizer]
    for each in found:
        found += [inner for inner in _attributes(each) if all(inner is not other for other in found)]
    return found


def own_methods(optimizer: optim.Optimizer) -> list[str]:
    """Return the names of the public methods that its class, or one between that and torch's, defines."""
    kinds = type(optimizer).__mro__
    kinds = kinds[: kinds.index(optim.Optimizer)]
    methods = [name for kind in kinds for name, what in vars(kind).items() if isinstance(what, FunctionType)]
    return [name for name in methods if not name.startswith("_")]


def _attributes(optimizer: optim.Optimizer) -> Iterator[optim.Optimizer]:
    for value in vars(optimizer).values():
        values = cast("list[Any]", value) if isinstance(value, list | tuple) else [value]
        yield from (each for each in values if isinstance(each, optim.Optimizer))
