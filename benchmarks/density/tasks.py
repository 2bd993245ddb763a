"""The three tasks of `density.py`: small models on real data, as tensors in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

from hpcsgd.data import ImageDataset, Split, Windows
from hpcsgd.data.windows import IGNORED
from hpcsgd.models import cifar_resnet, cnn, lstm

WORDS = 1000
"""Number of the most frequent words of the text that are kept; all others become one more."""
WINDOW = 20
"""Number of tokens."""


@dataclass(frozen=True)
class Samples:
    """Training and test samples: x [n, …], and y of int64, one or several for each x."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


@dataclass(frozen=True)
class Task:
    """A task for 16 workers, the same for all sparsifiers: SGD, whose rate twice falls to a tenth."""

    title: str
    density: float
    """The density that the DEFT paper uses for its model of the kind."""
    paper: float
    """Actual over set density of Top-k in the paper, with 16 workers."""
    samples: Callable[[Path, int], Samples]
    """Returns samples, given the folder of the dataset files and the number of training samples."""
    build: Callable[[], nn.Module]
    lr: float
    momentum: float
    batch: int
    """Batch size of each worker."""
    count: int
    """Number of training samples."""
    epochs: int


def images(path: Path, count: int) -> Samples:
    """Return images; the test set has at most twice as many as the training set."""
    return Samples(*first(ImageDataset(path, "train"), count), *first(ImageDataset(path, "test"), 2 * count))


def small_images(path: Path, count: int) -> Samples:
    """Return images with every four pixels averaged to one, so that an image takes a quarter of the time."""
    whole = images(path, count)
    return Samples(avg_pool2d(whole.x, 2), whole.y, avg_pool2d(whole.test_x, 2), whole.test_y)


def words(path: Path, count: int) -> Samples:
    """Return windows in which all rare words are the same, so that a small model trains in minutes."""
    x, y = first(Windows(path, "train", bptt=WINDOW), count)
    test_x, test_y = first(Windows(path, "test", bptt=WINDOW), 2000)
    numbers = torch.full((Windows(path, "test", bptt=WINDOW).types,), WORDS)
    frequent = torch.bincount(x.flatten(), minlength=len(numbers)).topk(WORDS).indices
    numbers[frequent] = torch.arange(WORDS)
    return Samples(numbers[x], _renamed(numbers, y), numbers[test_x], _renamed(numbers, test_y))


def first(data: Split, count: int) -> tuple[Tensor, Tensor]:
    return data.collate(data.__getitems__(list(range(min(count, len(data))))))


def _renamed(numbers: Tensor, y: Tensor) -> Tensor:
    return torch.where(y == IGNORED, y, numbers[y.clamp(min=0)])


TASKS = {
    "cifar10": Task(
        title="ResNet-8 on CIFAR-10",
        density=0.01, paper=13.59,
        samples=lambda folder, count: small_images(folder / "cifar10.h5", count),
        build=lambda: cifar_resnet(8),
        lr=0.05, momentum=0.9, batch=4, count=6400, epochs=30,
    ),
    "wikitext2": Task(
        title="LSTM on WikiText-2",
        density=0.001, paper=14.18,
        samples=lambda folder, count: words(folder / "wikitext2.h5", count),
        build=lambda: lstm(WORDS + 1, embedding=32, hidden=64, layers=1, dropout=0.0),
        lr=2.0, momentum=0.0, batch=2, count=16000, epochs=30,
    ),
    "mnist": Task(
        title="CNN on MNIST",
        density=0.1, paper=5.31,
        samples=lambda folder, count: images(folder / "mnist.h5", count),
        build=lambda: cnn((1, 28, 28), widths=(8, 16)),
        lr=0.02, momentum=0.9, batch=4, count=12800, epochs=4,
    ),
}  # fmt: skip
