"""The tasks of `time_to_quality.py`: small enough for few cores, with data as tensors in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path

import torch
from torch import Tensor, nn, optim
from torch.nn.functional import cross_entropy

from density.tasks import Samples, first, small_images
from hpcsgd.data import Windows
from hpcsgd.models import cnn, gpt, resnet20
from late_accuracy.tasks import digits

WINDOW = 128
"""Bytes of text that the GPT reads at once."""
AT_ONCE = 64
"""Number of samples that are evaluated at once."""


@dataclass(frozen=True)
class Task:
    """A training of `steps` steps. The learning rate rises for a twentieth of them and falls as a cosine."""

    title: str
    unit: str
    """The unit of the score; a lower score is better."""
    samples: Callable[[Path], Samples]
    """A function that reads the samples from the folder of the datasets."""
    build: Callable[[], nn.Module]
    optimizer: Callable[[Iterable[nn.Parameter], float], optim.Optimizer]
    """A function that takes the parameters and the learning rate."""
    lrs: Sequence[float]
    """The learning rates that are tried for every contestant."""
    score: Callable[[nn.Module, Tensor, Tensor], float]
    """A function that returns the sum of the scores of samples."""
    batch: int
    """Samples per rank and step."""
    steps: int


def text(folder: Path, train: int, test: int) -> Samples:
    """Return the first windows of WikiText-2's bytes."""
    path = folder / "wikitext2_bytes.h5"
    splits = (Windows(path, split, WINDOW, "bytes") for split in ("train", "test"))
    (x, y), (test_x, test_y) = (first(split, n) for split, n in zip(splits, (train, test), strict=True))
    return Samples(x, y, test_x, test_y)


def errors(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return 100 times the number of misclassified samples, so that the mean is in percent."""
    return 100.0 * int((model(x).argmax(1) != y).sum())


def bits(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the sum of the bits per byte of the windows."""
    return loss_of(model, x, y).item() / log(2) * len(x)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross entropy; `y` has one class per sample, or one per byte."""
    return cross_entropy(model(x).flatten(0, -2), y.flatten())


@torch.no_grad()
def score(task: Task, model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the sum of the scores of these samples."""
    model.eval()
    return sum(task.score(model, *part) for part in zip(x.split(AT_ONCE), y.split(AT_ONCE), strict=True))


def sgd(parameters: Iterable[nn.Parameter], lr: float) -> optim.Optimizer:
    return optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=1e-4)


def adamw(parameters: Iterable[nn.Parameter], lr: float) -> optim.Optimizer:
    return optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.1)


TASKS = {
    "gpt": Task(
        title="GPT on WikiText-2", unit="bits per byte",
        samples=lambda folder: text(folder, 30_000, 512),
        build=lambda: gpt(256, width=192, layers=3, heads=6),
        optimizer=adamw, lrs=(2e-3, 4e-3, 8e-3), score=bits, batch=2, steps=480,
    ),
    "resnet20": Task(
        title="ResNet-20 on CIFAR-10", unit="error, %",
        samples=lambda folder: small_images(folder / "cifar10.h5", 50_000),
        build=resnet20,
        optimizer=sgd, lrs=(0.05, 0.1, 0.2), score=errors, batch=16, steps=960,
    ),
}  # fmt: skip
QUICK = {
    "digits": Task(
        title="CNN on digits", unit="error, %",
        samples=lambda folder: digits(folder, 1280),
        build=lambda: cnn((1, 8, 8)),
        optimizer=sgd, lrs=(0.05,), score=errors, batch=4, steps=16,
    ),
}  # fmt: skip
