"""Images and the same reduced, on their way into a store of pairs for super-resolution.

Reduced by Pillow's bicubic interpolation, a = −½, with a kernel that grows with the scale, so that what is
too fine is averaged and not picked. MATLAB's `imresize`, by which most published figures were made, has the
same kernel, grown likewise (its antialiasing), but beyond the borders it repeats the image mirrored, where
Pillow leaves out what is not there; and Pillow rounds to 8 bits after each direction. So images differ by
about one of 255, near borders by more, and figures that are a few hundredths of a decibel apart cannot be
compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from hpcsgd.data.decoding import decoded, pillow, pixels
from hpcsgd.data.formats.streams import existing
from hpcsgd.data.image_folder import SPLITS, entries, require_suffix, split_folder
from hpcsgd.data.layout import label
from hpcsgd.errors import UserError, located

SCALES = (2, 4)
TILE = 64
"""Side of what is read at one go."""


@dataclass(frozen=True)
class Reduced:
    """What a store of pairs holds: of the collection `kind`, images and the same `scale` times as small;
    `least` is the shortest side of a small one for training."""

    kind: str
    scale: int
    least: int

    @property
    def holds(self) -> str:
        """In words, for whoever has converted it."""
        return f"reduced {self.scale} times, to {self.least} pixels a side or more"

    def write(self, file: h5py.File) -> None:
        label(file, "pairs", kind=self.kind)
        file.attrs.update({"scale": self.scale, "least": self.least})

    @staticmethod
    def read(file: h5py.File) -> Reduced:
        """Raises `KeyError` if something is missing."""
        attributes: dict[str, Any] = dict(file.attrs)
        return Reduced(attributes["kind"].decode(), int(attributes["scale"]), int(attributes["least"]))


@dataclass(frozen=True)
class Reductions:
    """PNG files of each split, to be read once and reduced; `told` how many of how many are."""

    files: Mapping[str, list[Path]]
    scale: int
    told: Callable[[int, int], None]

    @staticmethod
    def of(source: Path, scale: int, told: Callable[[int, int], None]) -> Reductions:
        """Raises `UserError` for another scale, and for a folder that is laid out otherwise."""
        if scale not in SCALES:
            raise UserError(
                f"scale = {scale}: images are reduced {' or '.join(map(str, SCALES))} times",
                key="scale",
                value=scale,
            )
        pillow()
        folder = existing(source, "a folder with train/ and val/")
        return Reductions({split: _pngs(split_folder(folder, split)) for split in SPLITS}, scale, told)

    @property
    def rows(self) -> Mapping[str, int]:
        """Images of each split."""
        return {split: len(paths) for split, paths in self.files.items()}

    def write(self, file: h5py.File, kind: str) -> Reduced:
        """Read all images into `file`, as the store of the collection `kind`."""
        least: dict[str, int] = {}
        done = 0
        for split, paths in self.files.items():
            group = file.create_group(split)
            group.attrs["count"] = len(paths)
            sides = []
            for number, path in enumerate(paths):
                with located(str(path)):
                    high, low = _pair(path, self.scale)
                pair = group.create_group(str(number))
                for name, values in (("high", high), ("low", low)):
                    tile = (min(TILE, values.shape[0]), min(TILE, values.shape[1]), 3)
                    pair.create_dataset(name, data=values, chunks=tile, fletcher32=True)
                sides.append(min(low.shape[:2]))
                done += 1
                self.told(done, sum(self.rows.values()))
            least[split] = min(sides)
        header = Reduced(kind, self.scale, least["train"])
        header.write(file)
        return header


def _pngs(place: Path) -> list[Path]:
    found = entries(place)
    for entry in found:
        require_suffix(entry, (".png",))
    if not found:
        raise UserError(f"{place}: no images in it")
    return [Path(entry.path) for entry in found]


def _pair(path: Path, scale: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """An image, without what is left over of its sides, and the same reduced."""
    try:
        image = decoded(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror})") from error
    width, height = (side // scale for side in image.size)
    if min(width, height) < scale:
        raise UserError(f"{image.size[0]} x {image.size[1]} pixels are too few to be reduced {scale} times")
    high = image.crop((0, 0, scale * width, scale * height))
    return pixels(high), pixels(high.resize((width, height), pillow().Resampling.BICUBIC))
