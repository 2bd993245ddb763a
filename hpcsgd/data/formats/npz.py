"""A user's own data from NumPy: files of `numpy.savez`, with samples for training and for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcsgd.data.arrays import Labelled, Part
from hpcsgd.errors import UserError, count_text, located

TEST_EVERY = 10
"""If there is no file for tests, one of this many samples of each class is held out for tests."""
MOST_CLASSES = 10_000_000
"""Maximum number of classes: a model has an output for each, and numbers of users or times are no classes."""
EXACT = 1 << 24
"""The largest whole number up to which float32 has all of them."""


def read(sources: Sequence[Path]) -> Labelled:
    """Return the arrays `x` and `y` of one file, or of one for training and one for tests.

    Of a single file each tenth sample of every class (the 10th, 20th, …) is for tests. Raises `UserError`,
    which names the file: if NumPy cannot read it or an array is missing, for values that are not finite
    numbers, or that float32 would round though they are whole, for labels that are not whole numbers from 0
    on, and for files that do not fit each other.
    """
    train, *test = map(_part, sources)  # perhaps one file twice
    if not test:
        train, *test = _divided(train, sources[0])
    elif train.x.shape[1:] != test[0].x.shape[1:]:
        parts = zip((train, *test), sources, strict=True)
        shapes = " and ".join(f"{list(part.x.shape[1:])} in {source}" for part, source in parts)
        raise UserError(f"samples differ in shape: {shapes}")
    classes = max(int(part.y.max()) for part in (train, *test)) + 1
    return Labelled({"train": train, "test": test[0]}, tuple(map(str, range(classes))))


def _part(source: Path) -> Part:
    with located(str(source)):
        x, y = _arrays(source)
        if x.ndim < 2 or not x.size:
            raise UserError(f"x has shape {list(x.shape)}: a row for each sample is needed, [n, ...]")
        if y.shape != x.shape[:1]:
            raise UserError(
                f"y has shape {list(y.shape)}: one label for each of {count_text(len(x), 'sample')} is needed"
            )
        return Part(_values(x), _labels(y))


def _arrays(source: Path) -> tuple[NDArray[np.generic], NDArray[np.generic]]:
    if not source.exists():
        raise UserError("no such file")
    try:
        with source.open("rb") as file:
            found = np.load(file, allow_pickle=False)
            if not isinstance(found, Mapping):
                raise UserError("a single array: write both by numpy.savez(FILE, x=samples, y=labels)")
            if missing := [name for name in ("x", "y") if name not in found]:
                there = ", ".join(found) or "nothing"
                raise UserError(f"no array {missing[0]!r} in it, but {there}: numpy.savez(FILE, x=…, y=…)")
            return found["x"], found["y"]
    except UserError:
        raise
    except Exception as error:  # a damaged file can raise nearly anything
        raise UserError(f"no file of numpy.savez, or damaged ({error})") from error


def _values(x: NDArray[Any]) -> NDArray[np.uint8] | NDArray[np.float32]:
    if x.dtype == np.uint8:
        return x.astype(np.uint8, copy=False)
    if x.dtype.kind not in "iuf":
        raise UserError(f"x is of {x.dtype}: numbers are needed")
    if x.dtype.kind in "iu" and x.dtype.itemsize > 2:
        rounded = np.flatnonzero(((x > EXACT) | (x < -EXACT)).reshape(len(x), -1).any(axis=1))
        if len(rounded):
            raise UserError(
                f"x: sample {rounded[0]} has a whole number beyond ±{EXACT:,}, which float32 may round: if "
                "that does no harm, write x.astype('float32')"
            )
    values = x.astype(np.float32)
    outside = np.flatnonzero(~np.isfinite(values).reshape(len(x), -1).all(axis=1))
    if len(outside):
        raise UserError(f"x: sample {outside[0]} has a value that is not finite in float32")
    return values


def _labels(y: NDArray[np.generic]) -> NDArray[np.int64]:
    if y.dtype.kind not in "iu":
        raise UserError(f"y is of {y.dtype}: classes are whole numbers from 0 on")
    if y.max() >= MOST_CLASSES:
        raise UserError(
            f"y: sample {int(y.argmax())} has the label {y.max()}: classes are 0, 1, 2, … up to "
            f"{MOST_CLASSES - 1:,}: number them by numpy.unique(y, return_inverse=True)"
        )
    labels = y.astype(np.int64)
    if labels.min() < 0:
        raise UserError(
            f"y: sample {int(labels.argmin())} has the label {labels.min()}: classes begin with 0"
        )
    return labels


def _divided(part: Part, source: Path) -> tuple[Part, Part]:
    nth_of_its_class = np.empty(len(part.y), np.int64)
    for label in np.unique(part.y):
        mine = part.y == label
        nth_of_its_class[mine] = np.arange(np.sum(mine))
    test = nth_of_its_class % TEST_EVERY == TEST_EVERY - 1
    if not test.any():
        raise UserError(
            f"{source}: no class has {TEST_EVERY} samples, of which one is held out to test on: "
            "give a second file, of samples to test on"
        )
    return Part(part.x[~test], part.y[~test]), Part(part.x[test], part.y[test])
