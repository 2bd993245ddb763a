"""Make dataset files that hold part of another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py


def first_images(source: Path, count: int, target: Path) -> Path:
    """Write a dataset file with only the first `count` training images; return its path.

    It is for machines on which training on all images takes too long.
    """
    with h5py.File(source) as whole, h5py.File(target, "w") as part:
        part.attrs.update(whole.attrs)
        for name in ("train/x", "train/y", "test/x", "test/y"):
            old: Any = whole[name]
            rows = count if name.startswith("train") else len(old)
            images = name.endswith("x")
            chunks = (1, *old.shape[1:]) if images else None
            part.create_dataset(name, data=old[:rows], chunks=chunks, fletcher32=images)
    return target
