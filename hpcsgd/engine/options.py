"""The options of parameter groups that must be the same on all ranks: all except the learning rate."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

from torch import Tensor

from hpcsgd.engine.in_parts import ELEMENTWISE, TENSORWISE
from hpcsgd.engine.muon_by_rows import PERIOD

OPTIONS = {name for kind in (*ELEMENTWISE, *TENSORWISE) for name in signature(kind).parameters} - {
    "params", "lr", "d"
} | {PERIOD}  # fmt: skip
"""Names of options of torch's optimizers, and of `hpcsgd.muon`, that no optimizer changes itself. Prodigy
changes `d`."""


class Options:
    """A checksum of the options of `groups`; it changes when an option changes."""

    def __init__(self, groups: Sequence[Mapping[str, Any]]) -> None:
        self._named = [(group, name) for group in groups for name in sorted(OPTIONS & group.keys())]
        self._values: list[Any] = []
        self._digest = 0

    def digest(self) -> int:
        """Return the checksum. Options that are tensors on accelerators are left out: the host would wait."""
        values = [_plain(group.get(name)) for group, name in self._named]
        if values != self._values:
            self._values, self._digest = values, zlib.crc32(repr(values).encode())
        return self._digest


def _plain(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return str(value.detach()) if value.device.type == "cpu" else None
