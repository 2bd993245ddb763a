"""Images with reduced copies that are to be written to a dataset file of pairs for super-resolution.

Images are reduced by Pillow's bicubic interpolation (a = −½), with a kernel that grows with the scale. So
fine details are averaged and not sampled. Most published results are for images reduced by MATLAB's
`imresize`. Its kernel is the same and grows in the same way (antialiasing). But `imresize` mirrors the image
beyond the borders, where Pillow uses only pixels that exist. Pillow also rounds to 8 bits after each
direction. So pixels differ by about 1 on the scale to 255, near borders by more. Do not compare published
results with ours if they differ by only a few hundredths of a decibel.
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
"""Side, in pixels, of the square tiles in which the file stores images; a tile is read as a whole."""


@dataclass(frozen=True)
class Reduced:
    """The header of a dataset file of pairs: images of the collection `kind`, reduced `scale` times.

    `least` is the shortest side, in pixels, of all reduced images for training.
    """

    kind: str
    scale: int
    least: int

    @property
    def holds(self) -> str:
        """A description of the file's content, for the output of `convert`."""
        return f"reduced {self.scale} times, to {self.least} pixels a side or more"

    def write(self, file: h5py.File) -> None:
        label(file, "pairs", kind=self.kind)
        file.attrs.update({"scale": self.scale, "least": self.least})

    @staticmethod
    def read(file: h5py.File) -> Reduced:
        """Read the header of `file`. Raises `KeyError` if a part of it is missing."""
        attributes: dict[str, Any] = dict(file.attrs)
        return Reduced(attributes["kind"].decode(), int(attributes["scale"]), int(attributes["least"]))


@dataclass(frozen=True)
class Reductions:
    """The PNG files of each split, which are read once and reduced when the dataset file is written.

    `progress` is called with the numbers of images done and in total.
    """

    files: Mapping[str, list[Path]]
    scale: int
    progress: Callable[[int, int], None]

    @staticmethod
    def of(source: Path, scale: int, progress: Callable[[int, int], None]) -> Reductions:
        """List the PNG files in the folder `source`.

        Raises `UserError` for a scale that is not in `SCALES`, and for a folder with another layout.
        """
        if scale not in SCALES:
            raise UserError(
                f"scale = {scale}: images are reduced {' or '.join(map(str, SCALES))} times",
                key="scale",
                value=scale,
            )
        pillow()
        folder = existing(source, "a folder with train/ and val/")
        return Reductions({split: _pngs(split_folder(folder, split)) for split in SPLITS}, scale, progress)

    @property
    def rows(self) -> Mapping[str, int]:
        """Number of images of each split."""
        return {split: len(paths) for split, paths in self.files.items()}

    def write(self, file: h5py.File, kind: str) -> Reduced:
        """Write all images to `file`, a new dataset file of the collection `kind`; return its header."""
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
                self.progress(done, sum(self.rows.values()))
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
    """Return the image at `path`, cropped to sides that are multiples of `scale`, and the reduced image."""
    try:
        image = decoded(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror})") from error
    width, height = (side // scale for side in image.size)
    if min(width, height) < scale:
        raise UserError(f"{image.size[0]} x {image.size[1]} pixels are too few to be reduced {scale} times")
    high = image.crop((0, 0, scale * width, scale * height))
    return pixels(high), pixels(high.resize((width, height), pillow().Resampling.BICUBIC))
