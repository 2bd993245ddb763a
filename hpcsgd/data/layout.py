"""The layout of a dataset file, for its writer and its readers.

A dataset file is an HDF5 file. Each split, such as `train` and `test`, is a group in it. All data have
Fletcher-32 checksums, except tokens, which have a CRC-32 for every 4096. A dataset file has one of these
forms, in which each split contains

=======  =================================================================================================
images   `x` uint8 [n, C, H, W], one HDF5 chunk per row, and the labels `y` uint8 [n]
arrays   `x` uint8 or float32 [n, ...], one HDF5 chunk per row, and the labels `y` int64 [n]
image    the labels `y` uint32 [n], and `shard`, `begin`, `length` and `crc32` of each image; the images
files    themselves are in shards next to the dataset file (`image_shards.py`), whose names are in `shards`
pairs    a group `0`, `1`, … for each image, with `high` uint8 [H, W, 3] and `low` uint8 [H/s, W/s, 3];
         the attribute `count` is the number of images, and `scale` of the file is s
tokens   a group `0`, `1`, … for each segment of 2^24 tokens (fewer in the last one), with `x` uint8, uint16
         or uint32 [n], as the number of types needs, without gaps in the file, and `crc32` uint32; the
         attributes `tokens` and, for text from files, `bytes` and `documents` are numbers of these; the
         file also has `definition`, that of the tokenizer
ratings  `x` int32 [n, 2 + m]: a user, an item that the user has rated, and m items that the user has not
         rated; the file also has `users` and `items` int64: the authors' numbers of user and item 0, 1, …
=======  =================================================================================================

The fields of `Header`, and further properties of a form, are attributes of the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np

from hpcsgd.errors import UserError, count_text
from hpcsgd.files.reading import require_regular

Form = Literal["images", "arrays", "image files", "pairs", "tokens", "ratings"]
FORMATS: dict[bytes, Form] = {
    b"hpcsgd images": "images",
    b"hpcsgd arrays": "arrays",
    b"hpcsgd image files": "image files",
    b"hpcsgd pairs": "pairs",
    b"hpcsgd tokens": "tokens",
    b"hpcsgd ratings": "ratings",
}
VERSIONS: dict[Form, int] = {
    "images": 1, "arrays": 1, "image files": 1, "pairs": 1, "tokens": 2, "ratings": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Header:
    """The header of a dataset file of images, or of image files.

    `kind` is the collection's name, `shape` is (C, H, W), and `scale` the largest pixel value. `mean` and
    `std` are mean and standard deviation of the training split, one value per channel, of pixels divided by
    `scale`.
    """

    kind: str
    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def holds(self) -> str:
        """A description of the file's content, for the output of `convert`."""
        return f"{' x '.join(map(str, self.shape))}, {count_text(len(self.classes), 'class')}"

    def write(self, file: h5py.File, form: Form = "images") -> None:
        """Write the header to the attributes of `file`, a dataset file of this `form`."""
        label(file, form, kind=self.kind, classes=self.classes)
        numbers = {"shape": self.shape, "scale": self.scale, "mean": self.mean, "std": self.std}
        file.attrs.update(numbers)

    @staticmethod
    def read(file: h5py.File) -> Header:
        """Read the header from the attributes of `file`. Raises `KeyError` if one is missing."""
        attributes: dict[str, Any] = dict(file.attrs)
        channels, height, width = (int(size) for size in attributes["shape"])
        return Header(
            kind=attributes["kind"].decode(),
            classes=tuple(name.decode() for name in attributes["classes"]),
            shape=(channels, height, width),
            scale=float(attributes["scale"]),
            mean=tuple(float(value) for value in attributes["mean"]),
            std=tuple(float(value) for value in attributes["std"]),
        )


def label(file: h5py.File, form: Form, **texts: str | Sequence[str]) -> None:
    """Set the attributes of `file` for its form and version, and an attribute for each of `texts`."""
    # HDF5 stores texts of fixed length in its checksummed headers, and others in places without checksums.
    given = {"format": f"hpcsgd {form}", **texts}
    file.attrs.update({name: np.char.encode(text, "utf-8") for name, text in given.items()})
    file.attrs["version"] = VERSIONS[form]


def form_of(path: Path) -> Form:
    """Return the form of the dataset file at `path`.

    Raises `UserError` if there is no dataset file, or it is of another version.
    """
    file, form = _open(path)
    file.close()
    return form


def open_dataset_file(path: Path, form: Form = "images") -> h5py.File:
    """Open the dataset file at `path`, which must be of this `form`, for reading.

    Raises `UserError` if there is no dataset file, or it has another form or version.
    """
    file, found = _open(path)
    if found != form:
        file.close()
        raise UserError(f"{path}: a dataset file of {found}, one of {form} is needed")
    return file


def dataset(file: h5py.File, name: str) -> h5py.Dataset:
    """Return the HDF5 dataset called `name` in `file`. Raises `KeyError` if there is none."""
    found = file[name]
    if not isinstance(found, h5py.Dataset):
        raise KeyError(f"{name} is no dataset")
    return found


def _open(path: Path) -> tuple[h5py.File, Form]:
    try:
        if not path.exists():
            raise UserError(f"{path}: no such file; `hpcsgd data convert` makes a dataset file")
        require_regular(path)
        # Complete files are never written to, and parallel file systems often refuse locks.
        file = h5py.File(path, "r", locking=False)
        form, version = file.attrs.get("format"), file.attrs.get("version")
    except (OSError, RuntimeError, KeyError) as error:
        raise UserError(f"{path}: not a dataset file, or damaged ({error})") from error
    if not isinstance(form, bytes) or form not in FORMATS:
        file.close()
        raise UserError(f"{path}: an HDF5 file, but not a dataset file made by `hpcsgd data convert`")
    found = FORMATS[form]
    if version != VERSIONS[found]:
        file.close()
        raise UserError(
            f"{path}: a dataset file of {found} of version {version}, only {VERSIONS[found]} is read here; "
            "convert it again"
        )
    return file, found
