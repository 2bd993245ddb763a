"""Parts of an optimizer's state, as they are saved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor


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
