"""Whether what a script gives `Sampler` and `Loader` is of the kinds that they take."""

from __future__ import annotations

import dataclasses
import hashlib
import operator
from collections.abc import Sized
from typing import Any

from hpcsgd.arguments import shown
from hpcsgd.data.partition import Partition
from hpcsgd.errors import UserError, count_text

LARGEST = 2**63 - 1


def whole_number(name: str, given: Any, least: int = 0) -> int:
    """`given` as an int, be it numpy's or torch's. Raises `UserError` for what is none, or out of range."""
    try:
        number = operator.index(given)
    except (TypeError, ValueError, RuntimeError):
        raise UserError(
            f"{name} = {shown(given)}: expected a whole number from {least} to 2^63 − 1"
        ) from None
    if not least <= number <= LARGEST:
        raise UserError(f"{name} = {shown(number)}: expected a whole number from {least} to 2^63 − 1")
    return number


def require_same_samples(data: object, dealt: int | None) -> None:
    """Raise `UserError` unless `data` can be read by index and has as many samples as are `dealt`, where that
    is known."""
    if not isinstance(data, Sized) or not hasattr(data, "__getitem__"):
        raise UserError(
            f"data = {shown(data)}: expected a dataset with a length, whose samples are read by their numbers"
        )
    if dealt is not None and len(data) != dealt:
        raise UserError(
            f"the sampler deals {count_text(dealt, 'sample')}, and the data has "
            f"{count_text(len(data), 'sample')}: give both the same dataset"
        )


def partition_text(partition: Partition | None) -> str:
    """A partition as ranks can have it in common, without an address."""
    if partition is None or dataclasses.is_dataclass(partition):
        return repr(partition)
    return type(partition).__qualname__


def digest_of(values: list[Any]) -> str:
    """Some letters that are others for other values."""
    return hashlib.blake2b(repr(values).encode(), digest_size=4).hexdigest()
