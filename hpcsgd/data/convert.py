"""Conversion of a downloaded collection to a dataset file."""

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
    """A collection in its original format, as a reader returns it. Its files may not be read yet."""

    @property
    def rows(self) -> Mapping[str, int]:
        """Number of images, tokens or ratings of each split."""
        ...

    def write(self, file: h5py.File, kind: str) -> Any:
        """Write the collection, named `kind`, to the new dataset file `file`, and return its header.

        Raises `UserError` if an original file is damaged.
        """
        ...


OWN = ("npz", "text", "images", "pairs")
"""Kinds of data that have functions and commands of their own, such as `convert_text`."""


@dataclass(frozen=True)
class Summary:
    """The result of a conversion.

    It has the path and header of the dataset file, the number of images, tokens or ratings of each split, and
    the size in bytes.
    """

    path: Path
    header: Any
    rows: dict[str, int]
    bytes: int

    def __str__(self) -> str:
        splits = ", ".join(f"{count} {split}" for split, count in self.rows.items())
        size = f"{self.bytes / 1e6:.1f} MB"
        return f"{self.path}: {self.header.kind}, {splits}, {self.header.holds}, {size}"


def convert(kind: str, source: Path | None, target: Path) -> Summary:
    """Write the collection `kind` (a key of `READERS`), read from `source`, as a dataset file at `target`.

    An existing dataset file at `target` is replaced once the new file is complete, and unchanged if anything
    fails. `digits` needs no source. Raises `UserError` for an unknown kind, for a source that is missing,
    damaged or truncated (with file and byte, or line), for a target that cannot be written, and for an
    existing target that is no dataset file.
    """
    if kind in OWN:
        raise UserError(f"data kind {kind!r}: hpcsgd.data.convert_{kind} converts them")
    if kind not in READERS:
        raise UserError(f"no data kind {kind!r}; {near_miss(kind, [*READERS, *OWN])}")
    _require_place(target)
    _require_dataset_file(target)
    return _written(READERS[kind](source), kind, target)


def convert_npz(sources: Sequence[Path], target: Path) -> Summary:
    """Write the arrays `x` and `y` of files of `numpy.savez` as a dataset file at `target`.

    `sources` is one file, or one for training and one for tests. Raises `UserError` as `convert` does, and
    for more files or none.
    """
    if len(sources) not in (1, 2):
        raise UserError(
            f"data convert npz: {count_text(len(sources), 'file')} given, expected TRAIN.npz [TEST.npz] DST"
        )
    _require_place(target)
    _require_dataset_file(target)
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
    """Write the text of files, or of folders of files, as a dataset file of tokens at `target`.

    `tokenizer` is "bytes" or a file of the library `tokenizers`, in which `end` is the name of the token
    that ends a document. `test` are files or folders for tests; without it every hundredth document is held
    out. `between` is a line that separates documents in a file. Raises `UserError` as `convert` does, and
    for a target in a folder that is read.
    """
    _require_place(target)
    _require_dataset_file(target)
    for source in (*sources, *test):
        if source.resolve() in target.resolve().parents:
            raise UserError(f"{target}: in {source}, of which all files are read: write it to another folder")
    return _written(Texts(sources, test, tokenizer_of(tokenizer, end), between), "text", target)


def convert_images(
    source: Path,
    target: Path,
    size: int = 224,
    progress: Callable[[int, int], None] = lambda done, all_: None,
) -> Summary:
    """Make a dataset file at `target` of a folder of images: train/, val/, each with a folder per class.

    Files are kept as they are, in shards in a folder next to the dataset file. Samples of `size` x `size`
    are made when they are read. Shards of unchanged files stay, so a killed conversion can be continued.
    `progress` is called with the numbers of images done and in total. Raises `UserError` as `convert` does,
    for a folder with another layout, and for the first file that is no image.
    """
    pillow()
    require_size(size)
    _require_place(target)
    _require_dataset_file(target)
    with _writing(target):
        folder = listed(source)
        shards = shards_of(folder, target, progress)
        summary = _written(Collected(folder, shards, size), "images", target)
        remove_others(target, shards)
    encoded = sum(int(shard.length.sum(dtype="u8")) for some in shards.values() for shard in some)
    return replace(summary, bytes=summary.bytes + encoded)


def convert_pairs(
    source: Path, target: Path, scale: int, progress: Callable[[int, int], None] = lambda done, all_: None
) -> Summary:
    """Make a dataset file at `target` of a folder with PNG images in train/ and val/, with reduced copies.

    Each image is reduced `scale` times, 2 or 4, by bicubic interpolation. `progress` is called with the
    numbers of images done and in total. Raises `UserError` as `convert` does, for a folder with another
    layout, another scale, and for the first file that is no image or too small.
    """
    _require_place(target)
    _require_dataset_file(target)
    return _written(Reductions.of(source, scale, progress), "pairs", target)


def _require_dataset_file(target: Path) -> None:
    if target.exists() and not h5py.is_hdf5(target):  # perhaps a source: the shell expands patterns
        raise UserError(
            f"{target}: there already, and no dataset file; the last path is the dataset file to write"
        )


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
