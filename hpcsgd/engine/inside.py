"""Optimizers inside another one, such as the base optimizer of SAM, and all of their state."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import FunctionType
from typing import Any, cast

from torch import Tensor, optim

from hpcsgd.errors import UserError

PREFIX = "inside"
"""Prefix of state names, before the number of the inner optimizer that has the state."""
WHOLE = "DistributedOptimizer is made with elementwise=False and tensorwise=False"


def optimizers_in(optimizer: optim.Optimizer) -> list[optim.Optimizer]:
    """Return `optimizer` and all optimizers inside it, in attributes or lists in attributes, at any depth."""
    found = [optimizer]
    for each in found:
        found += [inner for inner in _attributes(each) if all(inner is not other for other in found)]
    return found


def own_methods(optimizer: optim.Optimizer) -> list[str]:
    """Return the names of public methods that the optimizer's class or a base below `Optimizer` defines."""
    kinds = type(optimizer).__mro__
    kinds = kinds[: kinds.index(optim.Optimizer)]
    methods = [name for kind in kinds for name, what in vars(kind).items() if isinstance(what, FunctionType)]
    return [name for name in methods if not name.startswith("_")]


def _attributes(optimizer: optim.Optimizer) -> Iterator[optim.Optimizer]:
    for value in vars(optimizer).values():
        values = cast("list[Any]", value) if isinstance(value, list | tuple) else [value]
        yield from (each for each in values if isinstance(each, optim.Optimizer))


def with_own_state(optimizer: optim.Optimizer) -> list[optim.Optimizer]:
    """Return the optimizers inside `optimizer` that have a state of their own."""
    found: list[optim.Optimizer] = []
    for each in optimizers_in(optimizer):
        if all(each.state is not other.state for other in (optimizer, *found)):
            found.append(each)
    return found


def state_of(optimizers: Sequence[optim.Optimizer], key: Any) -> dict[str, Any]:
    """Return the state under `key` of all `optimizers`; names of inner optimizers' state get a prefix."""
    parts = enumerate(each.state.get(key, {}) for each in optimizers)
    return {_named(number, name): value for number, part in parts for name, value in part.items()}


def load_own_state(optimizers: Sequence[optim.Optimizer], key: Any, state: Mapping[str, Any]) -> None:
    """Load `state`, a result of `state_of`, under `key`."""
    parts: dict[int, dict[str, Any]] = defaultdict(dict)
    for name, value in state.items():
        number, own = _owner(name, len(optimizers))
        parts[number][own] = value
    for number, part in parts.items():
        optimizers[number].state[key] = part


def forget_tensors(optimizers: Sequence[optim.Optimizer]) -> None:
    """Drop the state of all parameters in each of `optimizers`."""
    for each in optimizers:
        state = cast("dict[Any, Any]", each.state)
        for key in [key for key in state if isinstance(key, Tensor)]:
            del state[key]


def shared_state(optimizer: optim.Optimizer) -> dict[Any, Any]:
    """Return the state under keys that are not parameters, such as MADGRAD's number of steps.

    It is the same on all ranks of a group.
    """
    parts = enumerate(_states(optimizer))
    every = ((number, key, value) for number, part in parts for key, value in part.items())
    return {_named(number, key): value for number, key, value in every if not isinstance(key, Tensor)}


def load_shared_state(optimizer: optim.Optimizer, state: Mapping[Any, Any]) -> None:
    """Replace the state that `shared_state` returns with a copy of `state`; tensors stay on their devices."""
    parts = _states(optimizer)
    before = shared_state(optimizer)
    for name in before:
        number, key = _owner(name, len(parts))
        del parts[number][key]
    for name, value in state.items():
        number, key = _owner(name, len(parts))
        own = before.get(name)
        if isinstance(own, Tensor) and isinstance(value, Tensor):
            parts[number][key] = value.to(own.device, copy=True)
        else:
            parts[number][key] = copy.deepcopy(value)


def require_saved(optimizer: optim.Optimizer, known: AbstractSet[Tensor]) -> None:
    """Raise `UserError` if a tensor other than `known` has state, which would not be saved."""
    for name in _other_names(optimizer, known):
        raise UserError(
            f"the optimizer's state has {name} of a whole parameter, of which this rank updates a part: "
            f"an optimizer around this one cannot be saved with it, unless {WHOLE}"
        )


def require_used(optimizer: optim.Optimizer, known: AbstractSet[Tensor]) -> None:
    """Raise `UserError` if a tensor other than `known` has state that the optimizer would not find."""
    if not optimizer.state.keys() <= known and (others := _other_names(optimizer, known)):
        own = {name for tensor in known for name in optimizer.state.get(tensor, {})}
        for name in others & own:
            raise UserError(
                f"{name} of a whole parameter was put into the optimizer's state, of which this rank updates "
                f"a part: the optimizer would not use it, unless {WHOLE}"
            )


def _other_names(optimizer: optim.Optimizer, known: AbstractSet[Tensor]) -> set[str]:
    state = cast("dict[Any, Any]", optimizer.state)
    others = (value for key, value in state.items() if isinstance(key, Tensor) and key not in known)
    return {name for value in others for name in value}


def _states(optimizer: optim.Optimizer) -> list[dict[Any, Any]]:
    return [each.state for each in [optimizer, *with_own_state(optimizer)]]


def _named(number: int, name: Any) -> Any:
    return name if number == 0 else f"{PREFIX}.{number - 1}.{name}"


def _owner(name: Any, count: int) -> tuple[int, Any]:
    """Return the index of the optimizer, one of `count`, to which `state_of` gave the prefix of `name`.

    Return the name without the prefix, too.
    """
    prefix, _, rest = name.partition(".") if isinstance(name, str) else ("", "", "")
    number, _, inner = rest.partition(".")
    inside = prefix == PREFIX and number.isdecimal() and int(number) + 1 < count
    return (int(number) + 1, inner) if inside else (0, name)
