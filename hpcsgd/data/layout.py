"""What a store looks like inside: the one place that both its writer and its readers go by.

A store is an HDF5 file with the groups `train` and `test`, each with `x` uint8 [n, C, H, W], one row a chunk,
and `y` uint8 [n], both with Fletcher-32 checksums. The fields of `Header` are attributes of the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcsgd.errors import UserError

FORMAT = "hpcsgd images"
VERSION = 1


@dataclass(frozen=True)
class Header:
    """What a store holds.

    `kind` is the collection's name, `shape` (C, H, W), `scale` the largest pixel value; `mean` and `std` are
    those of the training split, a value per channel, of pixels divided by `scale`.
    """

    kind: str
    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def write(self, file: h5py.File) -> None:
        """Set the attributes of `file`."""
        # Texts of fixed length lie within HDF5's checksummed headers, others do not.
        texts = {"format": FORMAT, "kind": self.kind, "classes": self.classes}
        file.attrs.update({name: np.char.encode(text, "utf-8") for name, text in texts.items()})
        numbers = {"shape": self.shape, "scale": self.scale, "mean": self.mean, "std": self.std}
        file.attrs.update({"version": VERSION, **numbers})

    @staticmethod
    def read(file: h5py.File) -> Header:
        """The attributes of `file`; raises `KeyError` if one is missing."""
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


def open_store(path: Path) -> h5py.File:
    """Open a store for reading; raises `UserError` if there is none at `path` or it is of another version."""
    if not path.exists():
        raise UserError(f"{path}: no such file; `hpcsgd data convert` makes a store")
    try:
        # Nobody writes to a complete store, and parallel file systems often refuse locks.
        file = h5py.File(path, "r", locking=False)
        form, version = file.attrs.get("format"), file.attrs.get("version")
    except (OSError, RuntimeError, KeyError) as error:
        raise UserError(f"{path}: not a store, or damaged ({error})") from error
    if form != FORMAT.encode():
        file.close()
        raise UserError(f"{path}: an HDF5 file, but not a store made by `hpcsgd data convert`")
    if version != VERSION:
        file.close()
        raise UserError(
            f"{path}: a store of version {version}, only {VERSION} is read here; convert it again"
        )
    return file
