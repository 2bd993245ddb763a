"""Reading of files, compressed files and tar archives, with errors that name the file and the byte."""

from __future__ import annotations

import bz2
import gzip
import lzma
import tarfile
import zlib
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path, PurePosixPath
from typing import IO, Any

from hpcsgd.errors import UserError
from hpcsgd.files.reading import require_regular

BLOCK = 1 << 20
DAMAGE = (EOFError, OSError, zlib.error, lzma.LZMAError, tarfile.TarError)
DECOMPRESSORS: dict[bytes, Callable[..., Any]] = {
    b"\x1f\x8b": gzip.open,
    b"\xfd7zXZ\x00": lzma.open,
    b"BZh": bz2.open,
}


class InputStream:
    """The bytes of one file or archive member, which are read once, from beginning to end.

    `name` says where they come from, and `offset` is the number of bytes read so far. Every error names both.
    """

    def __init__(self, name: str, stream: IO[bytes]) -> None:
        self.name = name
        self.offset = 0
        self._stream = stream

    @property
    def base(self) -> str:
        """The last part of the name: `data_batch_1.bin`."""
        return PurePosixPath(self.name).name

    def error(self, message: str, offset: int | None = None) -> UserError:
        """Return a `UserError` that names the byte `offset`, by default the current position."""
        return UserError(f"{self.name}: byte {self.offset if offset is None else offset}: {message}")

    def read(self, count: int = -1) -> bytes:
        """Read up to `count` bytes, or all that is left. Raises `UserError` if the input is damaged."""
        try:
            data = self._stream.read(count)
        except DAMAGE as error:
            raise self.error(f"damaged or truncated after this point ({error})") from error
        self.offset += len(data)
        return data

    def read_exactly(self, count: int, what: str) -> bytes:
        """Read `count` bytes. Raises `UserError` if the input ends before `what` is complete."""
        data = self.read(count)
        if len(data) < count:
            raise self.error(f"the file ends here, {count - len(data)} bytes short of {what}")
        return data

    def lines(self) -> Iterator[bytes]:
        """Yield the remaining lines, without their line breaks."""
        begun = b""
        while block := self.read(BLOCK):
            *whole, begun = (begun + block).split(b"\n")
            yield from whole
        if begun:
            yield begun

    def expect_end(self, what: str) -> None:
        """Raise `UserError`, which says that `what` should end here, if more bytes follow."""
        end = self.offset
        if self.read(1):
            raise self.error(f"{what} should end here, but more bytes follow", end)


def existing(source: Path | None, what: str) -> Path:
    """Return `source` if it exists. Otherwise raises `UserError`, which says that `what` is needed."""
    if source is None:
        raise UserError(f"no source given: {what} is needed")
    try:
        source.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f"{source}: no such file or folder; {what} is needed") from error
    except OSError as error:
        raise UserError(f"{source}: cannot be read ({error.strerror})") from error
    return source


@contextmanager
def opened(path: Path) -> Iterator[InputStream]:
    """Open a file for reading; if its first bytes show that it is compressed, decompress it."""
    with _raw(path) as raw, _decompressed(raw) as plain:
        name = str(path) if plain is raw else f"{path} (uncompressed)"
        yield InputStream(name, plain)


def members(source: Path, wanted: Container[str]) -> Iterator[InputStream]:
    """Yield the files with `wanted` names in a folder, in folders inside it, or in a tar archive.

    Only one is open at a time.
    """
    return _in_folder(source, wanted) if source.is_dir() else _in_archive(source, wanted)


def _in_folder(folder: Path, wanted: Container[str]) -> Iterator[InputStream]:
    for path in sorted([*folder.glob("*"), *folder.glob("*/*")]):
        if path.name in wanted and path.is_file():
            with _raw(path) as raw:
                yield InputStream(str(path), raw)


def _in_archive(path: Path, wanted: Container[str]) -> Iterator[InputStream]:
    with _raw(path) as raw, _decompressed(raw) as plain:
        try:
            with tarfile.open(fileobj=plain, mode="r|") as archive:
                for member in archive:
                    if member.isfile() and PurePosixPath(member.name).name in wanted:
                        stream = archive.extractfile(member)
                        assert stream is not None, "only what is not a file has no content"
                        yield InputStream(f"{path}: {member.name}", stream)
            _drain(plain)
        except DAMAGE as error:
            raise UserError(
                f"{path}: byte {raw.tell()}: not a tar archive, or damaged before this point ({error})"
            ) from error


def _drain(stream: IO[bytes]) -> None:
    """Read the stream to its end, because gzip and xz compare their checksums there."""
    while stream.read(BLOCK):
        pass


def _raw(path: Path) -> IO[bytes]:
    try:
        require_regular(path)
        return path.open("rb")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error


def _decompressed(raw: IO[bytes]) -> Any:
    try:
        start = raw.read(max(map(len, DECOMPRESSORS)))
        raw.seek(0)
    except OSError as error:
        raise UserError(f"{raw.name}: cannot be read ({error.strerror})") from error
    found = [opener for magic, opener in DECOMPRESSORS.items() if start.startswith(magic)]
    return found[0](raw) if found else nullcontext(raw)
