from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from data.pictures import noise, save, write_pngs
from hpcsgd.data import AsRank, Batches, Pairs, Sampler, convert_pairs
from hpcsgd.data.split import Drawn
from hpcsgd.errors import UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_pngs(tmp_path / "pngs")


@pytest.fixture
def path(tmp_path: Path, folder: Path) -> Path:
    convert_pairs(folder, tmp_path / "store.h5", 2)
    return tmp_path / "store.h5"


def pixels(path: Path) -> NDArray[np.uint8]:
    with Image.open(path) as image:
        return np.asarray(image)


def image(x: torch.Tensor) -> NDArray[np.uint8]:
    """Return [3, h, w] with values from 0 to 1 as an image [h, w, 3]."""
    return (x * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()


def cubic(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return Keys's cubic kernel with a = −½."""
    near = (1.5 * x**3 - 2.5 * x**2 + 1) * (x <= 1)
    return near + (-0.5 * x**3 + 2.5 * x**2 - 4 * x + 2) * ((x > 1) & (x < 2))


def reduced(values: NDArray[Any], scale: int) -> NDArray[np.float64]:
    """Return `values` reduced by `scale` along the first axis.

    The kernel is `scale` times as wide. Positions beyond the borders have no weight.
    """
    n = len(values)
    centres = (np.arange(n // scale) + 0.5) * scale - 0.5
    weights = cubic(np.abs(centres[:, None] - np.arange(n)) / scale)
    found: Any = np.tensordot(weights / weights.sum(1, keepdims=True), values.astype(np.float64), 1)
    return found


@pytest.mark.parametrize("scale", [2, 4])
def test_reduced_by_the_bicubic_kernel(tmp_path: Path, folder: Path, scale: int) -> None:
    convert_pairs(folder, tmp_path / "store.h5", scale)
    data = Pairs(tmp_path / "store.h5", "test", patch=5)
    assert (data.scale, len(data)) == (scale, 2)
    for i in range(2):
        x, y = data[i]
        high = pixels(folder / "val" / f"{i}.png")
        high = high[: len(high) // scale * scale, : high.shape[1] // scale * scale]
        assert np.array_equal(image(y), high)
        expected = reduced(reduced(high, scale).swapaxes(0, 1), scale).swapaxes(0, 1)
        assert np.abs(image(x).astype(float) - expected.clip(0, 255)).max() <= 1.01  # both are rounded
        assert np.abs(image(x).astype(float) - expected.clip(0, 255)).mean() < 0.4
        assert (x.shape[1] * scale, x.shape[2] * scale) == tuple(y.shape[1:])


def ways(x: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    """Return all eight rotations and reflections."""
    return [np.rot90(side, k) for side in (x, x[:, ::-1]) for k in range(4)]


def places(
    small: NDArray[np.uint8], large: NDArray[np.uint8], folder: Path, number: int, data: Pairs
) -> set[Any]:
    """Return all places and orientations in which these patches occur in image `number`."""
    high = pixels(folder / "train" / f"{number}.png")
    h, w = high.shape[0] // 2, high.shape[1] // 2
    low = np.asarray(Image.fromarray(high[: 2 * h, : 2 * w]).resize((w, h), Image.Resampling.BICUBIC))
    p, found = data.patch, set()
    for way, (a, b) in enumerate(zip(ways(small), ways(large), strict=True)):
        for top in range(h - p + 1):
            for left in range(w - p + 1):
                if np.array_equal(low[top : top + p, left : left + p], a):
                    inside = high[2 * top : 2 * (top + p), 2 * left : 2 * (left + p)]
                    assert np.array_equal(inside, b)
                    found.add((way, top, left))
    return found


def test_patches_are_of_one_place_in_both_images(path: Path, folder: Path) -> None:
    """Both patches have the same orientation, occur at all places, and come `patches` times per image."""
    data = Pairs(path, "train", patch=7, patches=4)
    assert len(data) == 12
    seen = set()
    for epoch in range(8):
        batch = data.__getitems__(Drawn(range(12), 1, epoch))
        assert (batch.x.shape, batch.y.shape) == ((12, 3, 7, 7), (12, 3, 14, 14))
        for row in range(12):
            found = places(image(batch.x[row]), image(batch.y[row]), folder, row // 4, data)
            assert len(found) == 1
            seen |= {(row // 4, *place) for place in found}
    assert len(seen) > 80
    assert {way for _, way, _, _ in seen} == set(range(8))
    assert {top for number, _, top, _ in seen if number == 0} == set(range(12 - 7 + 1))
    middle = data[0]
    assert places(image(middle[0]), image(middle[1]), folder, 0, data) == {(0, 3, 4)}


def drawn(path: Path, P: int, K: int, epoch: int = 1) -> dict[int, bytes]:
    data, found = Pairs(path, "train", patch=5, patches=4), {}
    for rank in range(P * K):
        sampler = Sampler(data, AsRank(rank, P * K, K), seed=2)
        sampler.set_epoch(epoch)
        for rows in Batches(sampler, 1):
            x, y = data.collate(data.__getitems__(rows))
            found[rows[0]] = x.numpy().tobytes() + y.numpy().tobytes()
    return found


@pytest.mark.parametrize(("P", "K"), [(1, 2), (3, 1), (2, 2)])
def test_patches_are_the_same_for_any_ranks(path: Path, P: int, K: int) -> None:
    assert drawn(path, P, K) == drawn(path, 1, 1)
    assert len(drawn(path, 1, 1)) == 12
    assert all(drawn(path, 1, 1, 2)[row] != x for row, x in drawn(path, 1, 1).items())


def test_whole_images_of_unlike_sizes_are_read_one_at_a_time(tmp_path: Path) -> None:
    folder = write_pngs(tmp_path / "pngs", {"train": [(20, 20)], "test": [(20, 26), (22, 26)]})
    convert_pairs(folder, tmp_path / "store.h5", 2)
    data = Pairs(tmp_path / "store.h5", "test", patch=8)
    assert [tuple(data[i][1].shape) for i in range(2)] == [(3, 20, 26), (3, 22, 26)]
    with pytest.raises(UserError, match="images 13 x 10 and 13 x 11 cannot be in one batch"):
        data.__getitems__([0, 1])


BAD: dict[str, tuple[Any, str]] = {
    "no train": (
        lambda f: shutil.rmtree(f / "train"),
        r"pngs: no folder train/ in it, with",
    ),
    "empty": (lambda f: [each.unlink() for each in (f / "val").iterdir()], "pngs/val: no images in it"),
    "JPEG": (
        lambda f: (f / "train/0.png").rename(f / "train/0.jpg"),
        r"0\.jpg: not an image; allowed here are files in \.png",
    ),
    "broken": (
        lambda f: (f / "val/1.png").write_bytes((f / "val/1.png").read_bytes()[:200]),
        r"val/1\.png: a broken image",
    ),
    "tiny": (
        lambda f: save(f / "train/9.png", noise(np.random.default_rng(0), 3, 30)),
        r"train/9\.png: 30 x 3 pixels are too few to be reduced 2 times",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_folders_that_cannot_be_converted(tmp_path: Path, folder: Path, name: str) -> None:
    spoil, message = BAD[name]
    spoil(folder)
    with pytest.raises(UserError, match=message) as caught:
        convert_pairs(folder, tmp_path / "store.h5", 2)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "store.h5").exists()


def test_a_folder_that_cannot_be_listed(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(UserError, match=r"^\S*/train: cannot be read \(Permission denied\)$"):
        convert_pairs(folder, tmp_path / "other.h5", 2)


def test_arguments_that_cannot_be(tmp_path: Path, folder: Path, path: Path) -> None:
    with pytest.raises(UserError, match="scale = 3: images are reduced 2 or 4 times"):
        convert_pairs(folder, tmp_path / "other.h5", 3)
    with pytest.raises(UserError, match=r"patch = 13: the smallest reduced image in .* has 12 pixels"):
        Pairs(path, "train", patch=13)
    with pytest.raises(UserError, match="patches = 0: must be at least 1"):
        Pairs(path, "train", patch=5, patches=0)
    with pytest.raises(UserError, match="no split 'val'; Allowed: test, train"):
        Pairs(path, "val", patch=5)


def test_a_damaged_tile_is_found(path: Path) -> None:
    import h5py

    with h5py.File(path) as file:
        x: Any = file["train/0/low"]
        place = x.id.get_chunk_info_by_coord((0, 0, 0)).byte_offset
    content = bytearray(path.read_bytes())
    content[place + 9] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match="split 'train' is damaged: image 0 cannot be read"):
        Pairs(path, "train", patch=5)[0]
    assert Pairs(path, "train", patch=5)[1][0].shape == (3, 5, 5)
