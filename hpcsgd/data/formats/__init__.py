"""Readers of the formats in which collections are distributed: one file per format."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from hpcsgd.data.corpus import Corpus
from hpcsgd.data.formats import cifar, digits, idx, movielens, wikitext
from hpcsgd.data.images import Images
from hpcsgd.data.interactions import Interactions

READERS: dict[str, Callable[[Path | None], Images | Corpus | Interactions]] = {
    "cifar10": partial(cifar.read, cifar.CIFAR10),
    "cifar100": partial(cifar.read, cifar.CIFAR100),
    "digits": digits.read,
    "mnist": idx.read,
    "movielens": movielens.read,
    "wikitext": wikitext.read,
}
"""For each kind of collection, the function that reads it from the path of its files."""
