"""Read documents from text files, and write their tokens to a dataset file.

No file has to fit into memory. A file is one document, or several if a separator line is given. In a
`.jsonl` file each line is a JSON object with the document as its "text". Files may be compressed, which is
detected from their first bytes. The tokenizer's end token follows each document.

The tokenizer gets at most about `SEGMENT` bytes at once. Longer documents are cut at the ends of lines.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np

from hpcsgd.data import token_segments
from hpcsgd.data.corpus import Vocabulary
from hpcsgd.data.formats.streams import InputStream, existing, opened
from hpcsgd.data.tokenizers import Tokenizer, decoded
from hpcsgd.errors import UserError, located
from hpcsgd.files.reading import parsed

SEGMENT = 1 << 20
"""Approximate maximum number of bytes that the tokenizer gets at once."""
LONGEST = 4
"""Maximum number of bytes of a character in UTF-8."""
HELD_OUT = 100
"""One of this many documents is held out for tests, if no files are given for tests."""


class Segment(NamedTuple):
    """A part of a document. `last` is True for the document's last part.

    `place` says where the part is in the sources, for errors.
    """

    text: bytes
    last: bool
    place: str


@dataclass
class Separator:
    """The line that separates documents in a file; `found` is True once a file had it."""

    line: str
    found: bool = False

    def __post_init__(self) -> None:
        if "\n" in self.line or self.line.endswith("\r"):
            raise UserError(
                f"between = {self.line!r}: a line without its line break, such as '' for empty lines",
                key="between",
                value=self.line,
            )
        self._bytes = self.line.encode()

    def is_line(self, line: bytes) -> bool:
        """Return True if `line`, without its line break, separates documents."""
        same = line.rstrip(b"\r") == self._bytes
        self.found |= same
        return same


@dataclass
class Texts:
    """Documents in files or folders of files (in the order of their names), which are read once.

    `test` are the files or folders for tests. If it is empty, every hundredth document of `train` is held
    out for tests. `between` is a line that separates documents in a file.
    """

    train: Sequence[Path]
    test: Sequence[Path]
    tokenizer: Tokenizer
    between: str | None = None
    rows: dict[str, int] = field(default_factory=dict)
    """Number of tokens of each split, once written."""

    def write(self, file: h5py.File, kind: str) -> Vocabulary:
        """Write all tokens to `file`, a new dataset file of the collection `kind`; return its header."""
        vocabulary = Vocabulary.of(self.tokenizer, kind)
        vocabulary.write(file)
        writers = {split: Writer(file.create_group(split), self.tokenizer) for split in ("train", "test")}
        separator = None if self.between is None else Separator(self.between)
        if self.test:
            for split, sources in (("train", self.train), ("test", self.test)):
                for document in _documents(sources, separator):
                    writers[split].add(document)
            self._require_found(separator)
        else:
            self._hold_out(writers, separator)
        for split, writer in writers.items():
            writer.finish()
            self.rows[split] = writer.tokens
            if not writer.tokens:
                raise UserError(f"there is no text to {split} on")
        return vocabulary

    def _require_found(self, separator: Separator | None) -> None:
        if separator is None or separator.found:
            return
        if not any(map(_has_objects, _files([*self.train, *self.test]))):
            raise UserError(
                f"between = {separator.line!r}: no file has this line, to the letter: give the line that "
                "separates documents, or leave it out if each file is one",
                key="between",
                value=separator.line,
            )

    def _hold_out(self, writers: Mapping[str, Writer], separator: Separator | None) -> None:
        files = list(_files(self.train))
        if separator is None and not any(map(_has_objects, files)):
            _require_enough(len(files))  # fail now rather than after hours
        count = 0
        for count, document in enumerate(_documents(self.train, separator), start=1):
            writers["train" if count % HELD_OUT else "test"].add(document)
        self._require_found(separator)
        _require_enough(count)


def _require_enough(documents: int) -> None:
    if documents < HELD_OUT:
        raise UserError(
            f"{documents} of the {HELD_OUT} documents of which one is held out for testing: name files to "
            "test on by --test, or the line that parts documents by --between"
        )


class Writer:
    """A writer of one split, which tokenizes many parts of documents at once and counts their bytes."""

    def __init__(self, group: h5py.Group, tokenizer: Tokenizer) -> None:
        self._group, self._tokenizer = group, tokenizer
        self._shards = token_segments.Writer(group, tokenizer.types)
        self._end = np.array([tokenizer.end])
        self._waiting: list[Segment] = []
        self._held = self._bytes = self._documents = 0

    @property
    def tokens(self) -> int:
        return self._shards.tokens

    def add(self, document: Iterable[Segment]) -> None:
        size = 0
        for piece in document:
            size += len(piece.text)
            if not size:
                continue  # an empty document gets no end token
            self._waiting.append(piece)
            self._held += len(piece.text)
            self._documents += piece.last
            if self._held >= SEGMENT:
                self._flush()

    def finish(self) -> None:
        self._flush()
        self._shards.finish()
        self._group.attrs.update({"bytes": self._bytes, "documents": self._documents})

    def _flush(self) -> None:
        for piece, tokens in zip(self._waiting, self._encoded(), strict=True):
            self._shards.append(tokens)
            if piece.last:
                self._shards.append(self._end)
        self._bytes += self._held
        self._waiting, self._held = [], 0

    def _encoded(self) -> Sequence[np.ndarray]:
        try:
            return self._tokenizer.encode([piece.text for piece in self._waiting])
        except UserError:
            for piece in self._waiting:  # find the faulty part, so that the error names its place
                with located(piece.place):
                    self._tokenizer.encode([piece.text])
            raise


def _documents(sources: Sequence[Path], separator: Separator | None) -> Iterator[Iterable[Segment]]:
    """Yield the documents one after the other; each must be consumed before the next is requested."""
    for path in _files(sources):
        with opened(path) as stream:
            if _has_objects(path):
                yield from _of_objects(stream)
            elif separator is None:
                yield _segments(stream)
            else:
                yield from _parted(stream, separator)


def _files(sources: Sequence[Path]) -> Iterator[Path]:
    for source in sources:
        there = existing(source, "a text file, or a folder of such")
        yield from sorted(_inside(there)) if there.is_dir() else [there]


def _inside(folder: Path) -> Iterator[Path]:
    """Yield the files in `folder` and in folders inside it, also behind links.

    Raises `UserError` for what cannot be read, because documents would be missing, and for a folder that
    links reach twice.
    """

    def failed(error: OSError) -> None:
        raise UserError(f"{error.filename}: cannot be read ({error.strerror})") from error

    seen: set[str] = set()
    for here, _, names in os.walk(folder, onerror=failed, followlinks=True):
        if (place := os.path.realpath(here)) in seen:
            raise UserError(f"{here}: a link to a folder that is read already: remove the link")
        seen.add(place)
        for path in (Path(here, name) for name in names):
            if not path.is_file():
                raise UserError(f"{path}: not a file that can be read, but a pipe, or a link to nothing")
            yield path


def _has_objects(path: Path) -> bool:
    return ".jsonl" in path.suffixes


def _segments(stream: InputStream) -> Iterator[Segment]:
    """Yield the parts of a document that is all of `stream`."""
    kept, begin = b"", 0
    while block := stream.read(SEGMENT):
        kept += block
        cut = _cut(kept)
        yield Segment(kept[:cut], False, f"{stream.name}: after byte {begin}")
        kept, begin = kept[cut:], begin + cut
    yield Segment(kept, True, f"{stream.name}: after byte {begin}")


def _cut(text: bytes) -> int:
    """Return where to cut the text: after its last line break, or before its last character without one."""
    if (end := text.rfind(b"\n")) >= 0:
        return end + 1
    last = next((i for i in range(1, min(len(text), LONGEST) + 1) if text[-i] & 0xC0 != 0x80), 0)
    return len(text) - last


def _parted(stream: InputStream, separator: Separator) -> Iterator[Iterable[Segment]]:
    groups = groupby(stream.lines(), key=separator.is_line)
    documents = (lines for parting, lines in groups if not parting)
    for number, lines in enumerate(documents, start=1):
        yield _of_lines((line + b"\n" for line in lines), f"{stream.name}: document {number}")


def _of_lines(lines: Iterable[bytes], place: str) -> Iterator[Segment]:
    some, size = [], 0
    for line in lines:
        some.append(line)
        size += len(line)
        if size >= SEGMENT:
            yield Segment(b"".join(some), False, place)
            some, size = [], 0
    yield Segment(b"".join(some), True, place)


def _of_objects(stream: InputStream) -> Iterator[Iterable[Segment]]:
    for number, line in enumerate(stream.lines(), start=1):
        if not line.strip():
            continue
        place = f"{stream.name}: line {number}"
        with located(place):
            yield _of_lines(_text(line).splitlines(keepends=True), place)


def _text(line: bytes) -> bytes:
    plain = decoded(line)
    try:
        found = parsed(plain)
    except ValueError as error:
        raise UserError(f"no JSON ({error})") from error
    text = found.get("text") if isinstance(found, dict) else None
    if not isinstance(text, str):
        raise UserError('expected an object with a string as its "text"')
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f'character {error.start} of its "text" is half of a surrogate pair, which is no character'
        ) from error
