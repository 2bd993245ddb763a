"""Decoding of images (JPEG or PNG) to pixels, by Pillow.

Training uses a random crop of random size and shape, mirrored or not, as in "Going Deeper with Convolutions"
(Szegedy et al., 2014), https://arxiv.org/abs/1409.4842, section 6. Tests use the centre: a square whose side
is 7/8 of the shorter side, such as 224 of 256 pixels.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from functools import cache
from math import exp, log, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcsgd.errors import UserError

FORMATS = ("JPEG", "PNG")
MIDDLE = 7 / 8
"""Side of the centre that is used for tests, as a fraction of the shorter side of the image."""
RATIOS = log(3 / 4), log(4 / 3)
"""Bounds of the logarithm of a random crop's ratio of width to height, which is distributed uniformly."""
ATTEMPTS = 10
"""Number of random crops that are tried until one fits into the image."""
DRAWS = 4 * ATTEMPTS + 1
"""Number of random numbers for a crop."""
Box = tuple[float, float, float, float]
"""The left, top, right and bottom of a box in an image, in pixels."""


@cache
def pillow() -> Any:
    """Return Pillow's module `Image`. Raises `UserError` if it is missing."""
    try:
        from PIL import Image
    except ImportError as error:
        raise UserError('images need the library Pillow: pip install "hpcsgd[images]"') from error
    return Image


def decoded(encoded: bytes) -> Any:
    """Return a JPEG or PNG file's bytes as a Pillow image in RGB.

    Raises `UserError` for damaged images, other formats, and grey images of 16 bits, which Pillow would turn
    white: it takes every value above 255 for 255.
    """
    library = pillow()
    try:
        image = library.open(io.BytesIO(encoded), formats=FORMATS)
        image.load()
        if image.mode.startswith("I"):
            raise UserError("a grey image of 16 bits, and samples have 8: scale its values to 0 … 255 before")
        if "transparency" in image.info:
            image = image.convert("RGBA")
        return image.convert("RGB")
    except UserError:
        raise
    except library.UnidentifiedImageError as error:
        raise UserError(f"neither {' nor '.join(FORMATS)}, or damaged where it begins") from error
    except (OSError, SyntaxError, ValueError, struct.error, library.DecompressionBombError) as error:
        raise UserError(f"a broken image ({error})") from error


def pixels(image: Any) -> NDArray[np.uint8]:
    """Return the pixels of an image of Pillow: uint8 [H, W, 3]."""
    return np.asarray(image, np.uint8)


def histogram(image: Any) -> NDArray[np.int64]:
    """Return how often each pixel value occurs in each channel of an image of Pillow: [3, 256]."""
    return np.array(image.histogram(), np.int64).reshape(3, 256)


def middle(image: Any, size: int) -> NDArray[np.uint8]:
    """Return the centre of the image, resized to size x size pixels: [size, size, 3]."""
    width, height = image.size
    side = min(width, height) * MIDDLE
    left, top = (width - side) / 2, (height - side) / 2
    return _resized(image, (left, top, left + side, top + side), size)


def varied(image: Any, size: int, smallest: float, draws: Sequence[float]) -> NDArray[np.uint8]:
    """Return a random crop of the image, resized to size x size pixels and mirrored half of the times.

    The crop has at least the fraction `smallest` of the image's area. `draws` are the random numbers to use,
    `DRAWS` numbers in [0, 1).
    """
    piece = _resized(image, _random_box(image.size, smallest, draws), size)
    return piece[:, ::-1] if draws[-1] < 0.5 else piece


def _random_box(size: tuple[int, int], smallest: float, draws: Sequence[float]) -> Box:
    """Return the first of `ATTEMPTS` random boxes that fits into an image of `size` (width, height).

    If no box fits, return the largest centred box with an allowed ratio of width to height.
    """
    (width, height), (low, high) = size, RATIOS
    for i in range(0, DRAWS - 1, 4):
        part, shape, across, down = draws[i : i + 4]
        area = width * height * (smallest + (1 - smallest) * part)
        ratio = exp(low + (high - low) * shape)
        w, h = round(sqrt(area * ratio)), round(sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(across * (width - w + 1)), int(down * (height - h + 1))
            return left, top, left + w, top + h
    ratio = min(max(width / height, exp(low)), exp(high))
    w, h = min(width, height * ratio), min(height, width / ratio)
    left, top = (width - w) / 2, (height - h) / 2
    return left, top, left + w, top + h


def _resized(image: Any, box: Box, size: int) -> NDArray[np.uint8]:
    return pixels(image.resize((size, size), pillow().Resampling.BILINEAR, box))
