"""What a reader of an original format hands to the writer of the store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BLOCK_ROWS = 1000


class Block(NamedTuple):
    """A run of rows of one split: `images` uint8 [b, C, H, W] and `labels` uint8 [b], from row `start` on."""

    split: str
    start: int
    images: NDArray[np.uint8]
    labels: NDArray[np.uint8]


@dataclass(frozen=True)
class Images:
    """A labelled image collection about to be read once, block by block, in any order.

    `shape` is (C, H, W); `scale` is the largest pixel value the format can hold; `rows` maps a split to its
    number of images. `blocks` together fill every row exactly once or raise `UserError`.
    """

    shape: tuple[int, int, int]
    classes: tuple[str, ...]
    scale: float
    rows: Mapping[str, int]
    blocks: Iterator[Block]


def in_blocks(
    split: str, start: int, images: NDArray[np.uint8], labels: NDArray[np.uint8]
) -> Iterator[Block]:
    """Cut `images` [n, C, H, W] and `labels` [n] into blocks of at most `BLOCK_ROWS` rows."""
    for first in range(0, len(images), BLOCK_ROWS):
        rows = slice(first, first + BLOCK_ROWS)
        yield Block(split, start + first, images[rows], labels[rows])
