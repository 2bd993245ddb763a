"""The tasks of `late_accuracy.py`: small enough for two cores, as tensors in memory."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn, optim

from density.tasks import Samples, images, small_images
from hpcsgd.data import Windows, convert
from hpcsgd.models import cnn, lstm, resnet20

CHARACTERS = 64
"""Number of distinct characters; the last stands for all that are not among the most frequent."""
WINDOW = 64
"""Length of a window in characters."""
TESTED = 1600
"""Number of windows of the test split."""
TO_A_WORD = 4
"""Minimum of the mean number of characters in a word, with the space."""


@dataclass(frozen=True)
class Task:
    """A task for four groups; the learning rate rises in the first twentieth, then falls as a cosine to 0."""

    title: str
    samples: Callable[[Path, int], Samples]
    """Returns samples, given the folder of the dataset files and the number of training samples."""
    build: Callable[[], nn.Module]
    optimizer: Callable[[Iterable[nn.Parameter]], optim.Optimizer]
    batch: int
    """Batch size of each group."""
    count: int
    """Number of training samples."""
    epochs: int
    by_loss: bool = False
    """True if the task is judged by the loss, not by the accuracy."""


def characters(path: Path, count: int) -> Samples:
    """Return windows of the beginning of the training text, and of the beginning of the test text."""
    text, test = (_text(path, split, n) for split, n in (("train", count), ("test", TESTED)))
    alphabet = [c for c, _ in Counter(text).most_common(CHARACTERS - 1)]
    places = {c: i for i, c in enumerate(alphabet)}
    return Samples(*windows(text, places, count), *windows(test, places, TESTED))


def _text(path: Path, split: str, count: int) -> str:
    """Return enough text for `count` windows."""
    words = Windows(path, split, bptt=(count * WINDOW + 1) // TO_A_WORD)
    [[tokens, _]] = [words.collate(words.__getitems__([0]))]
    return words.tokenizer.decode(tokens[0].tolist()).replace("<eos>", "\n")


def windows(text: str, places: dict[str, int], count: int) -> tuple[Tensor, Tensor]:
    asked = text[: count * WINDOW + 1]
    assert len(asked) == count * WINDOW + 1
    ids = torch.tensor([places.get(c, CHARACTERS - 1) for c in asked])
    return ids[:-1].view(count, WINDOW), ids[1:].view(count, WINDOW)


def digits(_: Path, count: int) -> Samples:
    """Return handwritten digits, which come with the library that reads them."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "digits.h5"
        convert("digits", None, store)
        return images(store, count)


def momentum(lr: float) -> Callable[[Iterable[nn.Parameter]], optim.Optimizer]:
    return lambda parameters: optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=1e-4)


TASKS = {
    "cifar10": Task(
        title="ResNet-20 on CIFAR-10",
        samples=lambda folder, count: small_images(folder / "cifar10.h5", count),
        build=resnet20, optimizer=momentum(0.05), batch=16, count=6400, epochs=5,
    ),
    "characters": Task(
        title="LSTM on characters",
        samples=lambda folder, count: characters(folder / "wikitext2.h5", count),
        build=lambda: lstm(CHARACTERS, embedding=32, hidden=128, layers=1, dropout=0.0),
        optimizer=lambda parameters: optim.Adam(parameters, lr=4e-3),
        batch=16, count=6400, epochs=5, by_loss=True,
    ),
}  # fmt: skip
QUICK = {
    "digits": Task(
        title="CNN on digits", samples=digits, build=lambda: cnn((1, 8, 8)),
        optimizer=momentum(0.02), batch=8, count=1280, epochs=3,
    ),
}  # fmt: skip
