"""The tokens of a split, in segments, which are mapped into memory from the file.

Segments are in the order of the text. A segment is an HDF5 dataset without gaps or filters, so that its bytes
in the file can be mapped into memory, at any size. Instead of HDF5's checksums there is a CRC-32 for every
block of `BLOCK` tokens. A process compares it when it first reads the block.
"""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from hpcsgd.data.layout import dataset, open_dataset_file
from hpcsgd.data.split import damaged

SHARD = 1 << 24
"""Number of tokens of every segment except the last."""
BLOCK = 1 << 12
"""Number of tokens with a common checksum."""
RUN = 1 << 17
"""Number of neighbouring tokens that are read together."""
REMEMBERED = 512
"""Number of announced runs that a process remembers, so that it does not announce them again.

Runs are announced to the kernel, which then reads them ahead.
"""
Tokens = NDArray[np.unsignedinteger[Any]]


def dtype_of(types: int) -> np.dtype[Any]:
    """Return the smallest dtype that can hold the tokens 0 … `types` − 1."""
    return np.dtype(np.min_scalar_type(types - 1)).newbyteorder("<")


class Writer:
    """A writer of the tokens of a split to its HDF5 `group`; at most one segment is in memory."""

    def __init__(self, group: h5py.Group, types: int) -> None:
        self._group, self._types = group, types
        self._dtype = dtype_of(types)
        self._room = np.empty(SHARD, self._dtype)
        self._filled = self._shards = 0
        self.tokens = 0

    def append(self, tokens: NDArray[Any]) -> None:
        assert not len(tokens) or 0 <= tokens.min() <= tokens.max() < self._types, "a token of no type"
        self.tokens += len(tokens)
        while len(tokens):
            some = tokens[: SHARD - self._filled]
            self._room[self._filled : self._filled + len(some)] = some
            self._filled += len(some)
            tokens = tokens[len(some) :]
            if self._filled == SHARD:
                self._close_shard()

    def finish(self) -> None:
        """Write the last segment and the total number of tokens."""
        if self._filled:
            self._close_shard()
        self._group.attrs["tokens"] = self.tokens

    def _close_shard(self) -> None:
        tokens = self._room[: self._filled]
        shard = self._group.create_group(str(self._shards))
        shard.create_dataset("x", data=tokens)
        blocks = (tokens[start : start + BLOCK] for start in range(0, len(tokens), BLOCK))
        sums = np.array([zlib.crc32(block.data) for block in blocks], "<u4")
        shard.create_dataset("crc32", data=sums, chunks=(len(sums),), fletcher32=True)
        self._shards, self._filled = self._shards + 1, 0


class TokenSegments:
    """The `count` tokens of a split of the dataset file at `path`, with `types` types of tokens.

    Each process maps the file when it first reads, so the object may be pickled and may cross forks. Raises
    `UserError` if the file does not have these tokens. Reading raises `UserError` if the file is damaged.
    """

    def __init__(self, path: Path, split: str, count: int, types: int) -> None:
        self.path, self.split, self.count = path, split, count
        self._dtype = dtype_of(types)
        self._places = self._found()  # offsets of segments in bytes
        self._checked = bytearray(-(-count // BLOCK))
        self._sums: dict[int, NDArray[np.uint32]] = {}
        self._content: mmap.mmap | None = None
        self._expected: dict[int, None] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_content": None, "_expected": {}}

    def expect(self, starts: NDArray[np.int64]) -> None:
        """Announce that windows with these starts will be read soon, so that the kernel can read ahead."""
        for run in sorted(set((starts // RUN).tolist())):
            if run not in self._expected:
                self._begin_to_read(run * RUN)
            self._expected.pop(run, None)
            self._expected[run] = None  # the latest at the end
        while len(self._expected) > REMEMBERED:
            del self._expected[next(iter(self._expected))]

    def windows(self, starts: NDArray[np.int64], length: int) -> Tokens:
        """Return the windows of `length` tokens that begin at `starts`: [len(starts), length]."""
        content = self._mapped()
        self._check(content, starts, length)
        shards, places = np.divmod(starts, SHARD)
        across = places > SHARD - length
        if not across.any():
            return self._within(content, shards, places, length)
        windows = np.empty((len(starts), length), self._dtype)
        windows[~across] = self._within(content, shards[~across], places[~across], length)
        for i in np.flatnonzero(across).tolist():
            windows[i] = np.concatenate(list(self._segments(content, int(starts[i]), length)))
        return windows

    def _segments(self, content: mmap.mmap, start: int, length: int) -> Iterator[Tokens]:
        """Yield the parts of the window of `length` tokens from `start` on, one for each of its segments."""
        stop = start + length
        while start < stop:
            shard, place = divmod(start, SHARD)
            some = min(stop - start, SHARD - place)
            yield self._within(content, np.array([shard]), np.array([place]), some)[0]
            start += some

    def _within(
        self, content: mmap.mmap, shards: NDArray[np.int64], places: NDArray[np.int64], length: int
    ) -> Tokens:
        """Return windows that begin at `places` of the segments `shards` and end inside these segments."""
        width = length * self._dtype.itemsize
        everywhere = np.ndarray((len(content) - width + 1, width), np.uint8, content, strides=(1, 1))
        begins = self._places[shards] + places * self._dtype.itemsize
        return everywhere[begins].view(self._dtype)  # bytes, because segments may begin at odd offsets

    def _check(self, content: mmap.mmap, starts: NDArray[np.int64], length: int) -> None:
        """Compare the checksums of those blocks of the windows that this process has not read before.

        Raises `UserError` if a block does not match its checksum.
        """
        first, last = starts // BLOCK, (starts + (length - 1)) // BLOCK
        there = {*first.tolist(), *last.tolist()}
        for i in range(1, (length - 2) // BLOCK + 1):
            there.update(np.minimum(first + i, last).tolist())
        new = [block for block in there if not self._checked[block]]
        with memoryview(content) as view:
            for block in sorted(new):
                begin, size = self._bytes_of(block * BLOCK, BLOCK)
                number, place = divmod(block, SHARD // BLOCK)
                if zlib.crc32(view[begin : begin + size]) != self._sums_of(number)[place]:
                    text = f"block {place} of shard {number} does not match its checksum"
                    raise damaged(self.path, self.split, text)
                self._checked[block] = True

    def _begin_to_read(self, start: int) -> None:
        begin, length = self._bytes_of(start, RUN)
        before = begin % mmap.PAGESIZE
        self._mapped().madvise(mmap.MADV_WILLNEED, begin - before, before + length)

    def _bytes_of(self, start: int, tokens: int) -> tuple[int, int]:
        """Return the first byte in the file and the number of bytes of `tokens` tokens from `start` on.

        There are fewer if their segment ends before.
        """
        number, before = divmod(start, SHARD)
        width = self._dtype.itemsize
        begin = int(self._places[number]) + before * width
        return begin, min(tokens, SHARD - before, self.count - start) * width

    def _mapped(self) -> mmap.mmap:
        """Return the whole file, mapped once, because every mapping costs a descriptor.

        Raises `UserError` if the file has been cut off. Each call looks at its size, because reading
        beyond the end would kill the process.
        """
        if self._content is None:
            with self.path.open("rb") as file:
                self._content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if self._content.size() < len(self._content):
            raise damaged(self.path, self.split, "the file has been cut off since it was opened")
        return self._content

    def _sums_of(self, number: int) -> NDArray[np.uint32]:
        if number not in self._sums:
            blocks = -(-min(SHARD, self.count - number * SHARD) // BLOCK)
            with open_dataset_file(self.path, "tokens") as file:
                try:
                    sums = np.asarray(file[f"{self.split}/{number}/crc32"])
                except (OSError, RuntimeError, KeyError) as error:
                    raise damaged(self.path, self.split, f"shard {number}: no checksums ({error})") from error
            if sums.shape != (blocks,):
                raise damaged(self.path, self.split, f"shard {number}: {len(sums)} checksums of {blocks}")
            self._sums[number] = sums
        return self._sums[number]

    def _found(self) -> NDArray[np.int64]:
        with open_dataset_file(self.path, "tokens") as file:
            try:
                names = sorted(file[self.split], key=int)  # pyright: ignore[reportArgumentType, reportCallIssue]
            except (OSError, RuntimeError, ValueError) as error:
                raise damaged(self.path, self.split, f"its shards cannot be read ({error})") from error
            if names != [str(number) for number in range(-(-self.count // SHARD))]:
                raise damaged(self.path, self.split, f"{len(names)} shards, {self.count} tokens")
            return np.array([self._place(file, number) for number in range(len(names))], np.int64)

    def _place(self, file: h5py.File, number: int) -> int:
        """Return the offset in bytes of segment `number` in the file.

        HDF5 has already checked that the file is long enough. Raises `UserError` if the segment is damaged.
        """
        length = min(SHARD, self.count - number * SHARD)
        try:
            x = dataset(file, f"{self.split}/{number}/x")
        except (OSError, RuntimeError, KeyError) as error:
            raise damaged(self.path, self.split, f"shard {number} cannot be read ({error})") from error
        place = x.id.get_offset()
        if (x.shape, x.dtype) != ((length,), self._dtype) or place is None:
            expected = f"expected {length} of {self._dtype}"
            text = f"shard {number} has {x.shape} of {x.dtype}, {expected}"
            raise damaged(self.path, self.split, text)
        return place
