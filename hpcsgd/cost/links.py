"""Measured times of an operation on one kind of communicator, and the lines fitted to them."""

from __future__ import annotations

import bisect
import math
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

from hpcsgd.config.kinds import Above, Minimum
from hpcsgd.cost.collectives import SHAPES, messages
from hpcsgd.cost.link_classes import Kind, LinkClass, load
from hpcsgd.errors import UserError, near_miss

ANY = "any"
"""The `operation` of a `Link` that is used for all operations that have no link of their own."""

Seconds = Annotated[float, Minimum(0)]
Count = Annotated[int, Minimum(1)]
Size = Annotated[int, Minimum(0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Lines T = messages·α + load·β for the seconds of one operation on one kind of communicator.

    Entry i of each list is for sizes from `from_bytes[i]` bytes on. A manually written link may have only α
    and β, as lists of one element.
    """

    operation: str
    kind: Literal["inside", "across", "mixed"]
    ranks: tuple[Count, ...] = ()
    """The numbers of ranks with which the operation was measured."""
    from_bytes: tuple[Size, ...] = (0,)
    alpha_seconds: tuple[Seconds, ...]
    beta_seconds_per_byte: tuple[Seconds, ...]
    alpha_standard_error_seconds: tuple[Seconds, ...] = ()
    beta_standard_error_seconds_per_byte: tuple[Seconds, ...] = ()
    relative_error: Seconds = 0.5
    """The error e: nine of ten held-out points were within a factor 1 + e of the lines, up or down.

    The default, for manually written files, is a guess.
    """

    def __post_init__(self) -> None:
        require_operation(self.operation, (*SHAPES, ANY))
        for name in ("from_bytes", "alpha_seconds", "beta_seconds_per_byte"):
            if not getattr(self, name):
                raise UserError(f"{name} = []: at least one segment is needed")
        count = len(self.from_bytes)
        for name in _PER_SEGMENT:
            given = getattr(self, name)
            if len(given) != count and (given or not name.endswith(_OPTIONAL)):
                raise UserError(f"{name} has {len(given)} segments, from_bytes {count}")
        if self.from_bytes[0] != 0 or any(a >= b for a, b in pairwise(self.from_bytes)):
            raise UserError(f"from_bytes = {list(self.from_bytes)}: segments begin with 0 and ascend")

    def apart(self, ranks: int) -> float:
        """Return how far `ranks` is from the nearest measured number of ranks p: |log2(ranks / p)|.

        Return 0 if no number is given.
        """
        return min((abs(math.log2(ranks / p)) for p in self.ranks), default=0.0)

    def seconds(self, operation: str, nbytes: float, way: LinkClass) -> float:
        """Return the seconds of `operation` on communicators of the class `way`, by the lines of this link.

        `operation` may differ from that of the link, if the link replaces one that was not measured.
        """
        i = bisect.bisect_right(self.from_bytes, nbytes) - 1
        latency = float(messages(operation, way.ranks)) * self.alpha_seconds[i]
        return latency + load(operation, nbytes, way) * self.beta_seconds_per_byte[i]


_OPTIONAL = ("standard_error_seconds", "standard_error_seconds_per_byte")
_PER_SEGMENT = (
    "alpha_seconds",
    "beta_seconds_per_byte",
    "alpha_standard_error_seconds",
    "beta_standard_error_seconds_per_byte",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """Measured times of one operation on one class of communicators, for several sizes in bytes.

    A time is the median of the slowest rank.
    """

    operation: str
    ranks: Count
    hosts: Count
    at_once: Count
    bytes: tuple[Count, ...]
    seconds: tuple[Annotated[float, Above(0)], ...]
    bare_seconds: tuple[Annotated[float, Above(0)], ...] = ()
    """Seconds if the calling thread runs the operation itself, without the communication thread."""

    def __post_init__(self) -> None:
        require_operation(self.operation, SHAPES)
        if not self.bytes or len(self.bytes) != len(self.seconds):
            raise UserError(
                f"{len(self.bytes)} bytes and {len(self.seconds)} seconds: as many are needed, at least one"
            )
        if self.bare_seconds and len(self.bare_seconds) != len(self.bytes):
            raise UserError(f"bare_seconds has {len(self.bare_seconds)} entries, bytes {len(self.bytes)}")

    @property
    def link_class(self) -> LinkClass:
        return LinkClass(self.ranks, self.hosts, self.at_once)

    @property
    def kind(self) -> Kind:
        return self.link_class.kind


def require_operation(operation: str, allowed: Collection[str]) -> None:
    """Raise `UserError`, with the nearest allowed name, unless `operation` is in `allowed`."""
    if operation not in allowed:
        raise UserError(f"operation = {operation!r}: {near_miss(operation, allowed)}")
