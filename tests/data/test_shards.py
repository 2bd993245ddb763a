"""Tokens read from a file: windows that cross the ends of shards, and damaged blocks."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hpcsgd.data import Windows
from hpcsgd.data.corpus import Corpus
from hpcsgd.data.token_segments import TokenSegments, dtype_of
from hpcsgd.errors import UserError
from hpcsgd.files.hdf5 import new_file

SHARD, BLOCK, COUNT = 96, 16, 500


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcsgd.data.token_segments.SHARD", SHARD)
    monkeypatch.setattr("hpcsgd.data.token_segments.BLOCK", BLOCK)


def write(path: Path, types: int, count: int = COUNT) -> NDArray[np.int32]:
    """Write `count` random tokens in each split, and return those of `train`."""
    tokens = np.random.default_rng(0).integers(0, types, count, np.int32)
    with new_file(path) as file:
        Corpus(tuple(f"w{i}" for i in range(types)), {"train": tokens, "test": tokens[::-1]}).write(file, "t")
    return tokens


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.h5"


@pytest.mark.parametrize(
    ("types", "bits"), [(1, 8), (256, 8), (257, 16), (65_536, 16), (65_537, 32), (200_000, 32)]
)
def test_the_narrowest_that_holds_all(types: int, bits: int) -> None:
    assert dtype_of(types) == np.dtype(f"<u{bits // 8}")


@pytest.mark.parametrize("types", [256, 300, 70_000])
@pytest.mark.parametrize("count", [1, SHARD - 1, SHARD, SHARD + 1, COUNT])
def test_windows_wherever_they_begin(path: Path, types: int, count: int) -> None:
    """A window may lie within a shard or cross the end of one or several."""
    tokens = write(path, types, count)
    shards = TokenSegments(path, "train", count, types)
    for length in {1, 7, BLOCK, SHARD, SHARD + 1, 2 * SHARD + 3, count} & set(range(1, count + 1)):
        starts = np.random.default_rng(1).permutation(count - length + 1)
        expected = [tokens[start : start + length] for start in starts]
        assert np.array_equal(shards.windows(starts, length), expected)
    assert np.array_equal(pickle.loads(pickle.dumps(shards)).windows(np.array([0]), 1)[0], tokens[:1])


def test_shards_share_a_descriptor(path: Path) -> None:
    """A process may open about a thousand descriptors, and a text may have as many shards."""
    write(path, 300)
    before = len(os.listdir("/proc/self/fd"))
    shards = TokenSegments(path, "train", COUNT, 300)
    shards.windows(np.arange(0, COUNT - 1, 10), 1)
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_the_kernel_is_given_runs_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run is announced again only after so many others that the kernel may have dropped it."""
    monkeypatch.setattr("hpcsgd.data.token_segments.RUN", 32)
    monkeypatch.setattr("hpcsgd.data.token_segments.REMEMBERED", 3)
    write(path, 300)
    shards, told = TokenSegments(path, "train", COUNT, 300), list[int]()
    tell = shards._begin_to_read
    monkeypatch.setattr(shards, "_begin_to_read", lambda start: (told.append(start // 32), tell(start)))
    for starts in ([0, 40, 33], [63, 499], [0, 64], [490], [0, 96], [64]):
        shards.expect(np.array(starts))
    assert told == [0, 1, 15, 2, 3, 2]


def test_a_damaged_block_is_named_when_it_is_read(path: Path) -> None:
    write(path, 300)
    with h5py.File(path, locking=False) as file:
        shard = file["train/2/x"]
        assert isinstance(shard, h5py.Dataset)
        place = shard.id.get_offset()
    content = bytearray(path.read_bytes())
    content[place + 2 * (BLOCK + 3)] ^= 1
    path.write_bytes(content)
    shards = TokenSegments(path, "train", COUNT, 300)
    shards.windows(np.array([2 * SHARD]), BLOCK)
    shards.windows(np.array([0, 2 * SHARD + 2 * BLOCK]), BLOCK)
    for _ in range(2):  # the failed read does not mark the block as valid
        with pytest.raises(
            UserError, match="'train' is damaged: block 1 of shard 2 does not match its checksum"
        ):
            shards.windows(np.array([2 * SHARD + 1, 0]), BLOCK)
    with pytest.raises(UserError, match="block 1 of shard 2"):
        shards.windows(np.array([SHARD - 5]), SHARD + 5 + BLOCK + 1)


def test_a_damaged_block_in_the_middle_of_a_window_is_found(path: Path) -> None:
    """The damage is found although neither end of the window is in the damaged block."""
    write(path, 300)
    with h5py.File(path, locking=False) as file:
        shard = file["train/2/x"]
        assert isinstance(shard, h5py.Dataset)
        place = shard.id.get_offset()
    content = bytearray(path.read_bytes())
    content[place + 2 * (BLOCK + 3)] ^= 1
    path.write_bytes(content)
    for before, length in ((1, BLOCK + 2), (BLOCK, 3 * BLOCK)):
        with pytest.raises(UserError, match="block 1 of shard 2"):
            TokenSegments(path, "train", COUNT, 300).windows(np.array([2 * SHARD + BLOCK - before]), length)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_truncated_file_is_refused_before_anything_is_read(path: Path, data: st.DataObject) -> None:
    if not path.exists():
        write(path, 300)
    whole = path.read_bytes()
    short = path.with_name("short.h5")
    short.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(
        UserError, match=r"short\.h5: (not a dataset file, or damaged|split 'train' is damaged)"
    ) as caught:
        Windows(short, "train")
    assert "\n" not in str(caught.value)


def test_a_shard_that_is_missing_or_another_is_refused(path: Path) -> None:
    write(path, 300)
    with h5py.File(path, "a") as file:
        file.move("train/3", "aside")
    with pytest.raises(UserError, match="split 'train' is damaged: 5 shards, 500 tokens; convert it again"):
        Windows(path, "train")
    with h5py.File(path, "a") as file:
        shard = file["aside"]
        assert isinstance(shard, h5py.Group)
        del shard["x"]
        shard["x"] = np.zeros(SHARD - 1, np.uint16)
        file.move("aside", "train/3")
    with pytest.raises(UserError, match=r"shard 3 has \(95,\) of uint16, expected 96 of uint16; convert"):
        Windows(path, "train")
    Windows(path, "test")
