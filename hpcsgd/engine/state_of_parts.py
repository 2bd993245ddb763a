"""The state of an optimizer that updates parts of parameters, as a training loop sees it and as it is saved.

The state is kept under the tensors that are parts of a parameter. A loop that looks up
`optimizer.state[param]`, to mask or reset it, would find nothing and continue, so the lookup raises an error.
Optimizers around this one may store other values under the parameter.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from torch import Tensor, nn

from hpcsgd.engine.inside import WHOLE
from hpcsgd.errors import UserError


class RangeState(NamedTuple):
    """The optimizer's state of one `ShardRange`."""

    elements: dict[str, Tensor]
    """Tensors with an entry for each element, by name."""
    rest: dict[str, Any]
    """All other values, by name."""


@dataclass(frozen=True)
class Place:
    """The place of a tensor that a rank updates: the elements [start, stop) of parameter number `index`."""

    index: int
    start: int
    stop: int
    whole: bool
    """True if these are all elements, in the parameter's shape."""


Part = tuple[Place, dict[str, Any]]
"""The optimizer's state of one tensor that a rank updates, by name, with the tensor's place."""


class StateOfParts(defaultdict[Any, Any]):
    """An optimizer's state by tensor, which refuses access to its own values under a divided parameter.

    `parts` has, for each divided parameter, the tensors that the optimizer updates in its place.
    """

    def __init__(self, state: Mapping[Any, Any], parts: Mapping[nn.Parameter, list[Tensor]]) -> None:
        super().__init__(dict, state)
        self._parts = parts

    def __reduce__(self) -> Any:
        return dict, (dict(self),)

    def __missing__(self, key: Any) -> Any:
        if key in self._parts:
            return OfWhole(
                lambda: self._names(key), lambda own: super(StateOfParts, self).__setitem__(key, own)
            )
        return super().__missing__(key)

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or bool(self._names(key))

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the value of `key`, else `default`."""
        return self[key] if key in self else default  # noqa: SIM401

    def pop(self, key: Any, *default: Any) -> Any:
        """Return the value of `key`, else `default`, and remove it."""
        self._require_none(key)
        return super().pop(key, *default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """Return the value of `key`; set it to `default` first if there is none."""
        self._require_none(key)
        return super().setdefault(key, default)

    update = MutableMapping[Any, Any].update

    def __setitem__(self, key: Any, value: Any) -> None:
        self._require_none(key)
        super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        self._require_none(key)
        super().__delitem__(key)

    def _require_none(self, key: Any) -> None:
        if names := self._names(key):
            refuse(names)

    def _names(self, key: object) -> set[str]:
        parts: Iterable[Tensor] = self._parts.get(key, ()) if isinstance(key, nn.Parameter) else ()
        states: Iterable[Mapping[str, Any]] = (super(StateOfParts, self).get(part, {}) for part in parts)
        return {name for state in states for name in state}


class OfWhole(MutableMapping[str, Any]):
    """The values that code other than the optimizer stores under a divided parameter.

    The optimizer's own state is stored under the parameter's parts, so access by one of its names is refused;
    the function `names` returns these names. When a value is set, `keep` stores this object in the
    optimizer's state.
    """

    def __init__(self, names: Callable[[], set[str]], keep: Callable[[OfWhole], None]) -> None:
        self._names, self._keep = names, keep
        self._values: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        self._require_other(name)
        return self._values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._require_other(name)
        self._values[name] = value
        self._keep(self)

    def __delitem__(self, name: str) -> None:
        self._require_other(name)
        del self._values[name]

    def __iter__(self) -> Iterator[str]:
        self._require_kept()
        return iter(self._values)

    def __len__(self) -> int:
        self._require_kept()
        return len(self._values)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(self._values, memo)

    def _require_other(self, name: str) -> None:
        if name in (names := self._names()):
            refuse(names)

    def _require_kept(self) -> None:
        """Refuse to list the values if only the optimizer has some: the caller looks for those."""
        if not self._values and (names := self._names()):
            refuse(names)


def refuse(names: set[str]) -> NoReturn:
    """Raise `UserError` for state `names` that are looked up under a parameter, not under its parts."""
    raise UserError(
        f"{', '.join(sorted(names))} in optimizer.state was looked up or changed by parameter, but it is of "
        "what this rank updates in place of each, a part or a copy: empty all by optimizer.state.clear(), "
        f"change it by state_dict() and load_state_dict(), or see to it that {WHOLE}"
    )
