"""Readers of the formats in which image collections are distributed: one format, one file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from hpcsgd.data.formats import cifar, digits, idx
from hpcsgd.data.images import Images

READERS: dict[str, Callable[[Path | None], Images]] = {
    "cifar10": partial(cifar.read, cifar.CIFAR10),
    "cifar100": partial(cifar.read, cifar.CIFAR100),
    "digits": digits.read,
    "mnist": idx.read,
}
