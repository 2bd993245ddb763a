"""Make a store from a collection as it was downloaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import h5py

from hpcsgd.data.decoding import pillow
from hpcsgd.data.formats import READERS, npz
from hpcsgd.data.image_files import Collected, require_size
from hpcsgd.data.image_folder import listed
from hpcsgd.data.image_shards import remove_others, shards_of
from hpcsgd.data.reductions import Reductions
from hpcsgd.data.texts import Texts
from hpcsgd.data.tokenizers import tokenizer_of
from hpcsgd.errors import UserError, count_text, near_miss
from hpcsgd.files.hdf5 import new_file


class Collection(Protocol):
    """What a reader of an original format gives: it may still be to be read."""

    @property
    def rows(self) -> Mapping[str, int]:
        """Of each split: images, tokens, ratings."""
        ...

    def write(self, file: h5py.File, kind: str) -> Any:
        """Fill a new file as the store of the collection `kind`; what it holds. Raises `UserError`."""
        ...


OWN = ("npz", "text", "images", "pairs")
"""Kinds that functions of their own convert, and commands of their own."""


@dataclass(frozen=True)
class Summary:
    """What was written: where, the header of the store, images (tokens, ratings) per split, bytes."""

    path: Path
    header: Any
    rows: dict[str, int]
    bytes: int

    def __str__(self) -> str:
        splits = ", ".join(f"{count} {split}" for split, count in self.rows.items())
        size = f"{self.bytes / 1e6:.1f} MB"
        return f"{self.path}: {self.header.kind}, {splits}, {self.header.holds}, {size}"


def convert(kind: str, source: Path | None, target: Path) -> Summary:
    """Write the collection `kind` (a key of `READERS`), read from `source`, as a store at `target`.

    An existing `target` is replaced once the new store is complete, and left as it is if anything fails.
    `digits` needs no source. Raises `UserError` for an unknown kind, for a source that is missing, damaged or
    truncated (with file and byte, or line), and for a target that cannot be written.
    """
    if kind in OWN:
        raise UserError(f"data kind {kind!r}: hpcsgd.data.convert_{kind} converts them")
    if kind not in READERS:
        raise UserError(f"no data kind {kind!r}; {near_miss(kind, [*READERS, *OWN])}")
    _require_place(target)
    return _written(READERS[kind](source), kind, target)


def convert_npz(sources: Sequence[Path], target: Path) -> Summary:
    """Write the arrays `x` and `y` of a file of `numpy.savez`, or of one to train on and one to test on, as a
    store at `target`.

    Raises `UserError` as `convert` does, for more files, and for a target that is there and no store.
    """
    if len(sources) > 2:
        raise UserError(
            f"data convert npz: {count_text(len(sources), 'file')} given, expected TRAIN.npz [TEST.npz] DST"
        )
    _require_place(target)
    _require_store(target)
    return _written(npz.read(sources), "npz", target)


def convert_text(
    sources: Sequence[Path],
    target: Path,
    tokenizer: str,
    *,
    test: Sequence[Path] = (),
    between: str | None = None,
    end: str | None = None,
) -> Summary:
    """Write the text of files, or of folders of files, as a store of tokens at `target`, in one pass.

    `tokenizer` is "bytes" or a file of the library `tokenizers`, in which documents end with the token called
    `end`; `test` are files or folders to test on, without which every hundredth document is held out;
    `between` is a line that parts documents in a file. Raises `UserError` as `convert` does, and for a target
    that is there and no store.
    """
    _require_place(target)
    _require_store(target)
    return _written(Texts(sources, test, tokenizer_of(tokenizer, end), between), "text", target)


def convert_images(
    source: Path, target: Path, size: int = 224, told: Callable[[int, int], None] = lambda done, all_: None
) -> Summary:
    """Make a store at `target` of a folder of images: train/ and val/, in each a folder a class.

    Files are kept as they are, in shards in a folder beside the store; samples are made of them when they are
    read, `size` x `size`. What has been converted before, and the files have not changed since, stays: so a
    conversion that was killed goes on. `told` how many images of how many are done. Raises `UserError` as
    `convert` does, for a folder that is laid out otherwise, and for the first file that is no image.
    """
    pillow()
    require_size(size)
    _require_place(target)
    _require_store(target)
    with _writing(target):
        folder = listed(source)
        shards = shards_of(folder, target, told)
        summary = _written(Collected(folder, shards, size), "images", target)
        remove_others(target, shards)
    encoded = sum(int(shard.length.sum(dtype="u8")) for some in shards.values() for shard in some)
    return replace(summary, bytes=summary.bytes + encoded)


def convert_pairs(
    source: Path, target: Path, scale: int, told: Callable[[int, int], None] = lambda done, all_: None
) -> Summary:
    """Make a store at `target` of a folder with PNG images in train/ and val/: each of them and, bicubic, the
    same `scale` times as small, 2 or 4.

    `told` how many images of how many are done. Raises `UserError` as `convert` does, for a folder that is
    laid out otherwise, another scale, and for the first file that is no image or too small.
    """
    _require_place(target)
    _require_store(target)
    return _written(Reductions.of(source, scale, told), "pairs", target)


def _require_store(target: Path) -> None:
    if target.exists() and not h5py.is_hdf5(target):  # perhaps the last of the files that a pattern named
        raise UserError(f"{target}: there already, and no store; the last path is the store to write")


def _require_place(target: Path) -> None:
    if target.is_dir():
        raise UserError(f"{target}: is a folder, a file name is needed")
    if not target.parent.is_dir():
        raise UserError(f"{target}: there is no folder {target.parent}")


def _written(collection: Collection, kind: str, target: Path) -> Summary:
    with _writing(target):
        with new_file(target) as file:
            header = collection.write(file, kind)
        return Summary(target, header, dict(collection.rows), target.stat().st_size)


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{target}: cannot be written ({error})") from error
