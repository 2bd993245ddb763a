"""Small folders of images, drawn by chance."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image


def noise(chance: np.random.Generator, height: int, width: int) -> NDArray[np.uint8]:
    """[H, W, 3]; smooth, so that what is near is alike."""
    rough = chance.integers(0, 256, (height // 4 + 2, width // 4 + 2, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(rough).resize((width, height), Image.Resampling.BILINEAR))


def save(path: Path, pixels: NDArray[np.uint8]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def write_classes(folder: Path, each: int = 6, side: int = 16, seed: int = 0) -> Path:
    """Of classes `cat` and `dog` so many to train on and half to test on; dogs are bright. JPEG and PNG by
    turns, all of `side` x `side` but every third one for training."""
    chance = np.random.default_rng(seed)
    for split, count in (("train", each), ("val", each // 2)):
        for name, least in (("cat", 0), ("dog", 1)):
            for i in range(count):
                width = side + (5 if split == "train" and i % 3 == 2 else 0)
                pixels = noise(chance, side, width) // 2 + np.uint8(100 * least)
                save(folder / split / name / f"{i}.{'png' if i % 2 else 'JPEG'}", pixels)
    return folder


def write_pngs(folder: Path, sizes: dict[str, list[tuple[int, int]]] | None = None, seed: int = 0) -> Path:
    """So many images of these heights and widths."""
    chance = np.random.default_rng(seed)
    for split, some in (
        sizes or {"train": [(24, 31), (27, 24), (40, 30)], "val": [(20, 26), (20, 26)]}
    ).items():
        for i, (height, width) in enumerate(some):
            save(folder / split / f"{i}.png", noise(chance, height, width))
    return folder
