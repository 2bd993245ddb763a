"""Make a store from a collection as it was downloaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import h5py

from hpcsgd.data.formats import READERS
from hpcsgd.data.texts import Texts
from hpcsgd.data.tokenizers import tokenizer_of
from hpcsgd.errors import UserError, near_miss
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
    if kind not in READERS:
        raise UserError(f"no data kind {kind!r}; {near_miss(kind, READERS)}")
    _require_place(target)
    return _written(READERS[kind](source), kind, target)


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
    if target.exists() and not h5py.is_hdf5(target):  # perhaps the last of the files that a pattern named
        raise UserError(f"{target}: there already, and no store; the last path is the store to write")
    return _written(Texts(sources, test, tokenizer_of(tokenizer, end), between), "text", target)


def _require_place(target: Path) -> None:
    if target.is_dir():
        raise UserError(f"{target}: is a folder, a file name is needed")
    if not target.parent.is_dir():
        raise UserError(f"{target}: there is no folder {target.parent}")


def _written(collection: Collection, kind: str, target: Path) -> Summary:
    try:
        with new_file(target) as file:
            header = collection.write(file, kind)
        return Summary(target, header, dict(collection.rows), target.stat().st_size)
    except OSError as error:
        raise UserError(f"{target}: cannot be written ({error})") from error
