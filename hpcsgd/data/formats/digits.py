"""The 1,797 handwritten digits of 8 x 8 pixels in 17 shades that scikit-learn includes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpcsgd.data.images import Block, Images, in_blocks
from hpcsgd.errors import UserError

TEST_EVERY = 5
"""One of this many samples of each class is for tests."""


def read(source: Path | None) -> Images:
    """Return scikit-learn's digits; `source` is ignored.

    Of every class each fifth sample (the 5th, 10th, … in scikit-learn's order) is for tests, the others for
    training. This needs no seed and keeps the classes balanced. Raises `UserError` without scikit-learn.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UserError(
            "the digits come with scikit-learn, which is not installed: pip install 'hpcsgd[examples]'"
        ) from error
    data, target = load_digits(return_X_y=True)
    labels = np.asarray(target, np.int64)  # with pandas, a type checker expects frames
    images = np.asarray(data).reshape(-1, 1, 8, 8).astype(np.uint8)
    test = _for_testing(labels)
    rows = {"train": int(np.sum(~test)), "test": int(np.sum(test))}
    names = tuple(str(digit) for digit in range(10))
    return Images((1, 8, 8), names, 16.0, rows, _blocks(images, labels.astype(np.uint8), test))


def _for_testing(labels: NDArray[np.int64]) -> NDArray[np.bool_]:
    nth_of_its_class = np.empty(len(labels), np.int64)
    for digit in range(10):
        nth_of_its_class[labels == digit] = np.arange(np.sum(labels == digit))
    return nth_of_its_class % TEST_EVERY == TEST_EVERY - 1


def _blocks(images: NDArray[np.uint8], labels: NDArray[np.uint8], test: NDArray[np.bool_]) -> Iterator[Block]:
    yield from in_blocks("train", 0, images[~test], labels[~test])
    yield from in_blocks("test", 0, images[test], labels[test])
