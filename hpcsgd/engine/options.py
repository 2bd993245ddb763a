"""The options of param groups besides the learning rate, which ranks have in common at each step."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

from torch import Tensor

from hpcsgd.engine.in_parts import ELEMENTWISE, TENSORWISE

OPTIONS = {name for kind in (*ELEMENTWISE, *TENSORWISE) for name in signature(kind).parameters} - {
    "params", "lr", "d"
}  # fmt: skip
"""Those that torch's optimizers know: no optimizer changes them by itself, but Prodigy `d`."""


class Options:
    """Has a number for the options of `groups`, which is another one once somebody changes any."""

    def __init__(self, groups: Sequence[Mapping[str, Any]]) -> None:
        self._named = [(group, name) for group in groups for name in sorted(OPTIONS & group.keys())]
        self._values: list[Any] = []
        self._digest = 0

    def digest(self) -> int:
        """Return the number. The host does not wait for tensors on other devices, and leaves them out."""
        values = [_plain(group.get(name)) for group, name in self._named]
        if values != self._values:
            self._values, self._digest = values, zlib.crc32(repr(values).encode())
        return self._digest


def _plain(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return str(value.detach()) if value.device.type == "cpu" else None
