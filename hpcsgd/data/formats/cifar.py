"""CIFAR-10 and CIFAR-100 as distributed: Python or binary batches, in a folder or in a tar archive.

A binary record is its labels, one byte each, then 3 x 32 x 32 pixels, channel by channel
(https://www.cs.toronto.edu/~kriz/cifar.html). CIFAR-100 has two labels, of which the fine one is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcsgd.data.formats.pickled import load_dictionary
from hpcsgd.data.formats.streams import InputStream, existing, members
from hpcsgd.data.images import BLOCK_ROWS, Block, Images, in_blocks
from hpcsgd.errors import UserError

SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32
CIFAR10_CLASSES = "airplane automobile bird cat deer dog frog horse ship truck"
CIFAR100_CLASSES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard
lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear
pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark
shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone
television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""


class Batch(NamedTuple):
    """One file of a CIFAR collection: `count` images that become the rows of `split` from `start` on."""

    name: str
    split: str
    start: int
    count: int


class Label(NamedTuple):
    """One of the labels of an image: its key in the Python batches, and its number of classes."""

    key: str
    classes: int


@dataclass(frozen=True)
class Layout:
    """The files, labels and class names of a CIFAR collection; the last of `labels` is the one to learn."""

    batches: tuple[Batch, ...]
    labels: tuple[Label, ...]
    classes: tuple[str, ...]


CIFAR10 = Layout(
    batches=(
        *(Batch(f"data_batch_{i + 1}", "train", 10_000 * i, 10_000) for i in range(5)),
        Batch("test_batch", "test", 0, 10_000),
    ),
    labels=(Label("labels", 10),),
    classes=tuple(CIFAR10_CLASSES.split()),
)

CIFAR100 = Layout(
    batches=(Batch("train", "train", 0, 50_000), Batch("test", "test", 0, 10_000)),
    labels=(Label("coarse_labels", 20), Label("fine_labels", 100)),
    classes=tuple(CIFAR100_CLASSES.split()),
)


def read(layout: Layout, source: Path | None) -> Images:
    """Return CIFAR from the folder or archive `source`. Raises `UserError` if there is none."""
    found = existing(source, "the CIFAR archive as downloaded, or the folder it unpacks to,")
    rows: dict[str, int] = {}
    for batch in layout.batches:
        rows[batch.split] = rows.get(batch.split, 0) + batch.count
    return Images(SHAPE, layout.classes, 255.0, rows, _blocks(layout, found))


def _blocks(layout: Layout, source: Path) -> Iterator[Block]:
    readers = {"": _python_batch, ".bin": _binary_batch}
    files = {b.name + suffix: (b, reader) for b in layout.batches for suffix, reader in readers.items()}
    found: set[str] = set()
    for stream in members(source, files):
        batch, reader = files[stream.base]
        if batch.name in found:
            raise UserError(
                f"{stream.name}: {batch.name} is there twice; give the folder that holds one copy"
            )
        found.add(batch.name)
        yield from reader(layout, batch, stream)
    missing = [batch.name for batch in layout.batches if batch.name not in found]
    if missing:
        raise UserError(
            f"{source}: missing {', '.join(missing)} (or the same ending in .bin); "
            "give the archive as downloaded, or the folder it unpacks to"
        )


def _binary_batch(layout: Layout, batch: Batch, stream: InputStream) -> Iterator[Block]:
    width = len(layout.labels) + PIXELS
    for first in range(0, batch.count, BLOCK_ROWS):
        count = min(BLOCK_ROWS, batch.count - first)
        data = stream.read_exactly(count * width, f"records {first} to {first + count - 1} of {batch.count}")
        records = np.frombuffer(data, np.uint8).reshape(count, width)
        for column, label in enumerate(layout.labels):
            wrong = _first_wrong(records[:, column], label)
            if wrong is not None:
                raise stream.error(
                    f"{label.key[:-1]} {records[wrong, column]} is not below {label.classes}",
                    (first + wrong) * width + column,
                )
        labels, pixels = records[:, len(layout.labels) - 1], records[:, len(layout.labels) :]
        yield Block(batch.split, batch.start + first, pixels.reshape(count, *SHAPE), labels)
    stream.expect_end(f"the batch of {batch.count} records")


def _python_batch(layout: Layout, batch: Batch, stream: InputStream) -> Iterator[Block]:
    content = load_dictionary(stream)
    pixels = content.get("data")
    if (
        not isinstance(pixels, np.ndarray)
        or pixels.dtype != np.uint8
        or pixels.shape != (batch.count, PIXELS)
    ):
        raise UserError(
            f"{stream.name}: 'data' should be uint8 [{batch.count}, {PIXELS}], not {_describe(pixels)}"
        )
    labels = [_python_labels(content.get(label.key), label, batch, stream) for label in layout.labels]
    yield from in_blocks(batch.split, batch.start, pixels.reshape(-1, *SHAPE), labels[-1])


def _python_labels(given: Any, label: Label, batch: Batch, stream: InputStream) -> NDArray[np.uint8]:
    whole = isinstance(given, list) and all(isinstance(value, int) for value in given)
    if not whole or len(given) != batch.count:
        raise UserError(
            f"{stream.name}: {label.key!r} should list {batch.count} numbers, not {_describe(given)}"
        )
    values = np.array(given)
    wrong = _first_wrong(values, label)
    if wrong is not None:
        raise UserError(
            f"{stream.name}: image {wrong}: {label.key[:-1]} {values[wrong]} is not below {label.classes}"
        )
    return values.astype(np.uint8)


def _first_wrong(values: NDArray[Any], label: Label) -> int | None:
    wrong = np.flatnonzero((values < 0) | (values >= label.classes))
    return int(wrong[0]) if len(wrong) else None


def _describe(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    return f"a list of {len(value)}" if isinstance(value, list) else type(value).__name__
