"""Checks of the arguments of `Sampler` and `Loader`, and of the batches of `Injected`."""

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
    """Return `given`, which may be an integer of NumPy or torch, as an int.

    Raises `UserError`, which names the argument `name`, unless it is a whole number from `least` to
    `LARGEST`.
    """
    try:
        number = operator.index(given)
    except (TypeError, ValueError, RuntimeError):
        raise UserError(
            f"{name} = {shown(given)}: expected a whole number from {least} to 2^63 − 1"
        ) from None
    if not least <= number <= LARGEST:
        raise UserError(f"{name} = {shown(number)}: expected a whole number from {least} to 2^63 − 1")
    return number


def require_same_samples(data: object, assigned: int | None) -> None:
    """Raise `UserError` unless `data` can be indexed and has as many samples as its sampler.

    `assigned` is the number of samples of the sampler, or None if it is unknown.
    """
    if not isinstance(data, Sized) or not hasattr(data, "__getitem__"):
        raise UserError(
            f"data = {shown(data)}: expected a dataset with a length, whose samples are read by their numbers"
        )
    if assigned is not None and len(data) != assigned:
        raise UserError(
            f"the sampler has {count_text(assigned, 'sample')}, and the data has "
            f"{count_text(len(data), 'sample')}: give both the same dataset"
        )


def require_rows(batch: Any, rows: int) -> None:
    """Raise `UserError` unless `batch` is a list or tuple of tensors with `rows` rows each."""
    kinds = [type(x).__name__ for x in batch]
    if not isinstance(batch, list | tuple) or set(kinds) != {"Tensor"}:
        raise UserError(f"injection: expected batches of tensors, given {type(batch).__name__} of {kinds}")
    if any(len(x) != rows for x in batch):
        raise UserError(f"injection: {[len(x) for x in batch]} samples were loaded, expected {rows} of each")


def partition_text(partition: Partition | None) -> str:
    """Return a text for `partition` that ranks can compare, so without the address of an object."""
    if partition is None or dataclasses.is_dataclass(partition):
        return repr(partition)
    return type(partition).__qualname__


def digest_of(values: list[Any]) -> str:
    """Return a short hash of `values`, as text, by which ranks can compare them."""
    return hashlib.blake2b(repr(values).encode(), digest_size=4).hexdigest()
