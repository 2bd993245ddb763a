"""MNIST, and collections in its format (Fashion-MNIST, KMNIST): four idx files, gzipped or not.

An idx file begins with the bytes 0, 0, 8 (for unsigned bytes) and the number of dimensions. The size of each
dimension follows, as a big-endian 32-bit number, and then the values.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path

import numpy as np

from hpcsgd.data.formats.streams import InputStream, existing, opened
from hpcsgd.data.images import BLOCK_ROWS, Block, Images
from hpcsgd.errors import UserError, count_text

CLASSES = 10
PREFIXES = {"train": "train", "test": "t10k"}


def read(source: Path | None) -> Images:
    """Return the images of the four idx files in the folder `source`.

    Raises `UserError` for a file that is missing, is not idx, or disagrees with the others.
    """
    folder = existing(source, "the folder with the four idx files")
    files = {
        split: (_find(folder, p, "images", 3), _find(folder, p, "labels", 1)) for split, p in PREFIXES.items()
    }
    counts = {split: _counts(images, labels) for split, (images, labels) in files.items()}
    sizes = {tuple(size) for _, *size in counts.values()}
    if len(sizes) > 1:
        raise UserError(f"{folder}: images of the splits differ in size: {sorted(sizes)}")
    height, width = sizes.pop()
    return Images(
        shape=(1, height, width),
        classes=tuple(str(digit) for digit in range(CLASSES)),
        scale=255.0,
        rows={split: count for split, (count, *_) in counts.items()},
        blocks=_blocks(files),
    )


def _find(folder: Path, prefix: str, what: str, dimensions: int) -> Path:
    names = [f"{prefix}-{what}{dot}idx{dimensions}-ubyte{end}" for dot in "-." for end in ("", ".gz")]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise UserError(f"{folder}: missing {names[1]} (or {names[0]})")


def _counts(images: Path, labels: Path) -> list[int]:
    with opened(images) as stream:
        dimensions = _header(stream, 3)
    with opened(labels) as stream:
        (label_count,) = _header(stream, 1)
    if label_count != dimensions[0]:
        raise UserError(
            f"{labels}: byte 4: says {count_text(label_count, 'label')}, but {images} says "
            f"{count_text(dimensions[0], 'image')}"
        )
    return dimensions


def _header(stream: InputStream, dimensions: int) -> list[int]:
    magic = stream.read_exactly(4, "the idx header")
    if magic != bytes([0, 0, 8, dimensions]):
        raise stream.error(
            f"not an idx file of bytes in {dimensions} dimensions: it starts with {magic.hex()}", 0
        )
    sizes = [int.from_bytes(stream.read_exactly(4, "the idx header"), "big") for _ in range(dimensions)]
    if 0 in sizes:
        raise stream.error(f"nothing in it: dimensions {sizes}", 4)
    return sizes


def _blocks(files: dict[str, tuple[Path, Path]]) -> Iterator[Block]:
    for split, (images, labels) in files.items():
        with opened(images) as image_stream, opened(labels) as label_stream:
            yield from _split_blocks(split, image_stream, label_stream)


def _split_blocks(split: str, images: InputStream, labels: InputStream) -> Iterator[Block]:
    total, height, width = _header(images, 3)
    _header(labels, 1)
    for start in range(0, total, BLOCK_ROWS):
        shape = (min(BLOCK_ROWS, total - start), 1, height, width)
        what = f"{{}} {start} to {start + shape[0] - 1} of {total}"
        pixels = np.frombuffer(images.read_exactly(prod(shape), what.format("images")), np.uint8)
        values = np.frombuffer(labels.read_exactly(shape[0], what.format("labels")), np.uint8)
        wrong = np.flatnonzero(values >= CLASSES)
        if len(wrong):
            raise labels.error(f"label {values[wrong[0]]} is not below {CLASSES}", 8 + start + int(wrong[0]))
        yield Block(split, start, pixels.reshape(shape), values)
    images.expect_end(f"the file of {count_text(total, 'image')}")
    labels.expect_end(f"the file of {count_text(total, 'label')}")
