"""Small folders of random images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image


def noise(chance: np.random.Generator, height: int, width: int) -> NDArray[np.uint8]:
    """Return a random image [H, W, 3]; it is smooth, so that neighboring pixels are similar."""
    rough = chance.integers(0, 256, (height // 4 + 2, width // 4 + 2, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(rough).resize((width, height), Image.Resampling.BILINEAR))


def save(path: Path, pixels: NDArray[np.uint8] | NDArray[np.uint16]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def write_classes(folder: Path, each: int = 6, side: int = 16, seed: int = 0) -> Path:
    """Write images of the classes `cat` and `dog`, and return `folder`.

    Each class has `each` training images and half as many test images. Dogs are bright. JPEG and PNG
    alternate. All images are `side` x `side`, except that every third training image is wider.
    """
    chance = np.random.default_rng(seed)
    for split, count in (("train", each), ("val", each // 2)):
        for name, least in (("cat", 0), ("dog", 1)):
            for i in range(count):
                width = side + (5 if split == "train" and i % 3 == 2 else 0)
                pixels = noise(chance, side, width) // 2 + np.uint8(100 * least)
                save(folder / split / name / f"{i}.{'png' if i % 2 else 'JPEG'}", pixels)
    return folder


def write_pngs(folder: Path, sizes: dict[str, list[tuple[int, int]]] | None = None, seed: int = 0) -> Path:
    """Write images of the given heights and widths for each split, and return `folder`."""
    chance = np.random.default_rng(seed)
    for split, some in (
        sizes or {"train": [(24, 31), (27, 24), (40, 30)], "val": [(20, 26), (20, 26)]}
    ).items():
        for i, (height, width) in enumerate(some):
            save(folder / split / f"{i}.png", noise(chance, height, width))
    return folder
