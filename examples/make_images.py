"""A folder of small images to try things with, drawn here: nothing is downloaded.

    python examples/make_images.py FOLDER            train/ and val/ with a folder a class, for `data convert
    images` python examples/make_images.py FOLDER --pairs    PNG images in train/ and val/, for `data convert
    pairs`

Classes are shapes, of any colour, place and size. For pairs: stripes and disks, with edges that are lost when
they are reduced.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

SHAPES = ("cross", "disk", "frame", "stripes")
TRAIN, VAL = 240, 60
"""Images of a class."""
PAIRS_TRAIN, PAIRS_VAL = 40, 8
Box = tuple[int, int, int, int]


def colour(chance: np.random.Generator) -> tuple[int, int, int]:
    red, green, blue = chance.integers(40, 256, 3).tolist()
    return red, green, blue


def draw(shape: str, pen: ImageDraw.ImageDraw, box: Box, ink: tuple[int, int, int]) -> None:
    left, top, right, bottom = box
    thick = max(2, (right - left) // 5)
    match shape:
        case "cross":
            pen.line([left, top, right, bottom], ink, thick)
            pen.line([left, bottom, right, top], ink, thick)
        case "disk":
            pen.ellipse(box, ink)
        case "frame":
            pen.rectangle(box, outline=ink, width=thick)
        case _:
            for y in range(top, bottom, 2 * thick):
                pen.rectangle([left, y, right, y + thick - 1], ink)


def shape_image(chance: np.random.Generator, shape: str) -> Image.Image:
    """Of 48 to 80 pixels a side, on a dark ground."""
    width, height = chance.integers(48, 81, 2).tolist()
    image = Image.new("RGB", (width, height), tuple(chance.integers(0, 40, 3).tolist()))
    side = int(chance.integers(28, 45))
    left, top = int(chance.integers(0, width - side)), int(chance.integers(0, height - side))
    draw(shape, ImageDraw.Draw(image), (left, top, left + side, top + side), colour(chance))
    return image


def scene(chance: np.random.Generator) -> Image.Image:
    """Many shapes over each other, of 120 to 180 pixels a side."""
    width, height = chance.integers(120, 181, 2).tolist()
    image = Image.new("RGB", (width, height), colour(chance))
    pen = ImageDraw.Draw(image)
    for _ in range(25):
        side = int(chance.integers(10, 60))
        left, top = int(chance.integers(0, width)), int(chance.integers(0, height))
        draw(str(chance.choice(SHAPES)), pen, (left, top, left + side, top + side), colour(chance))
    return image


def save(folder: Path, name: str, make: Callable[[], Image.Image], quality: int | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if quality is None:
        make().save(folder / f"{name}.png")
    else:
        make().save(folder / f"{name}.jpg", quality=quality)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pairs", action="store_true")
    given = parser.parse_args()
    chance = np.random.default_rng(0)
    for split, count, pairs in (("train", TRAIN, PAIRS_TRAIN), ("val", VAL, PAIRS_VAL)):
        place = given.folder / split
        if given.pairs:
            for i in range(pairs):
                save(place, f"{i:04d}", lambda: scene(chance), None)
        else:
            for shape in SHAPES:
                for i in range(count):
                    save(place / shape, f"{i:04d}", lambda shape=shape: shape_image(chance, shape), 90)


if __name__ == "__main__":
    main()
