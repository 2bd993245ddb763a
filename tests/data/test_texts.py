"""Files of text as tokens: a dataset file has the bytes of the documents, with a 0 after each."""

from __future__ import annotations

import bz2
import errno
import gzip
import json
import os
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hpcsgd.data import Windows, convert_text
from hpcsgd.data.tokenizers import ByteTokenizer
from hpcsgd.errors import UserError


def tokens(path: Path, split: str) -> bytes:
    data = Windows(path, split, bptt=1)
    return bytes([*(int(x) for x, _ in data), int(data[len(data) - 1][1])])


def packed(*documents: str) -> bytes:
    return b"".join(document.encode() + b"\0" for document in documents)


def write(folder: Path, **texts: str) -> list[Path]:
    """Write a file `a.txt` for a text named `a`, and so on; return their paths."""
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)
    return [folder / f"{name}.txt" for name in texts]


@pytest.fixture
def test_file(tmp_path: Path) -> Path:
    (path,) = write(tmp_path, held="to test on")
    return path


def test_files_and_folders(tmp_path: Path, test_file: Path) -> None:
    folder = tmp_path / "texts"
    write(folder, b="second\n", a="first", d="")
    write(folder / "c", z="third\n\n")
    last, *_ = write(tmp_path, last="\nlast")
    made = convert_text([folder, last], tmp_path / "s.h5", "bytes", test=[test_file])
    assert tokens(tmp_path / "s.h5", "train") == packed("first", "second\n", "third\n\n", "\nlast")
    assert tokens(tmp_path / "s.h5", "test") == packed("to test on")
    assert str(made) == f"{tmp_path}/s.h5: text, 28 train, 11 test, 256 types, 0.0 MB"
    with h5py.File(tmp_path / "s.h5") as file:
        counts = dict(file["train"].attrs)
    assert counts == {"tokens": 28, "bytes": 24, "documents": 4}, "of nothing there is no end"


def test_links_in_a_folder(tmp_path: Path, test_file: Path) -> None:
    folder, elsewhere = tmp_path / "texts", tmp_path / "elsewhere"
    write(folder, a="first", c="third")
    write(elsewhere, z="second")
    (folder / "b").symlink_to(elsewhere)
    convert_text([folder], tmp_path / "s.h5", "bytes", test=[test_file])
    assert tokens(tmp_path / "s.h5", "train") == packed("first", "second", "third")
    for name, to, message in (
        ("d", elsewhere, "a link to a folder that is read already"),
        ("d", folder, "a link to a folder that is read already"),
        ("d.txt", tmp_path / "gone", r"d\.txt: not a file that can be read"),
    ):
        (folder / name).symlink_to(to)
        with pytest.raises(UserError, match=message):
            convert_text([folder], tmp_path / "s.h5", "bytes", test=[test_file])
        (folder / name).unlink()


def test_a_folder_that_cannot_be_listed(
    tmp_path: Path, test_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "texts", a="text")
    write(tmp_path / "texts" / "closed", b="text")
    scandir = os.scandir

    def refused(path: str) -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(UserError, match=r"^\S*/closed: cannot be read \(Permission denied\)$"):
        convert_text([tmp_path / "texts"], tmp_path / "s.h5", "bytes", test=[test_file])


def test_a_target_among_the_sources(tmp_path: Path, test_file: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "b").mkdir(parents=True)
    write(folder, a="first")
    for train, test in (([folder], [test_file]), ([test_file], [folder])):
        with pytest.raises(
            UserError, match=r"^\S*/b/s\.h5: in \S*/texts, of which all files are read: write"
        ):
            convert_text(train, folder / "b" / "s.h5", "bytes", test=test)


def test_a_source_that_cannot_be_read_is_named(tmp_path: Path, test_file: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for source, message in (
        (tmp_path / "pipe", r"^\S*/pipe: a pipe, and not a file$"),
        (tmp_path / ("x" * 300), r"^\S*/x+: cannot be read \(File name too long\)$"),
    ):
        with pytest.raises(UserError, match=message):
            convert_text([source], tmp_path / "s.h5", "bytes", test=[test_file])


def test_compressed_or_not(tmp_path: Path, test_file: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one\n"))
    (tmp_path / "b.txt").write_bytes(bz2.compress(b"two\n"))
    convert_text([tmp_path / "a.txt.gz", tmp_path / "b.txt"], tmp_path / "s.h5", "bytes", test=[test_file])
    assert tokens(tmp_path / "s.h5", "train") == packed("one\n", "two\n")
    whole = (tmp_path / "a.txt.gz").read_bytes()
    (tmp_path / "a.txt.gz").write_bytes(whole[:-9])
    with pytest.raises(UserError, match=r"a\.txt\.gz \(uncompressed\): byte .* damaged or truncated"):
        convert_text([tmp_path / "a.txt.gz"], tmp_path / "s.h5", "bytes", test=[test_file])
    assert tokens(tmp_path / "s.h5", "train") == packed("one\n", "two\n"), "the old store is still there"


@pytest.mark.parametrize(("between", "line"), [("<|endoftext|>", "<|endoftext|>"), ("", ""), ("--", "--\r")])
def test_documents_within_a_file(tmp_path: Path, test_file: Path, between: str, line: str) -> None:
    write(tmp_path, a=f"one\none\n{line}\n{line}\ntwo --\n{line}\n", b="three")
    sources = [tmp_path / "a.txt", tmp_path / "b.txt"]
    convert_text(sources, tmp_path / "s.h5", "bytes", test=[test_file], between=between)
    assert tokens(tmp_path / "s.h5", "train") == packed("one\none\n", "two --\n", "three\n")


@pytest.mark.parametrize("between", ["\n", "line\r", "a\nb"])
def test_a_separator_is_one_line(tmp_path: Path, test_file: Path, between: str) -> None:
    with pytest.raises(UserError, match=r"^between = '.*\\.*': a line without its line break"):
        convert_text([test_file], tmp_path / "s.h5", "bytes", test=[test_file], between=between)


def test_a_separator_that_no_file_has(tmp_path: Path, test_file: Path) -> None:
    (text,) = write(tmp_path, a="one<|end|>two\n<|end|> \nthree")
    with pytest.raises(UserError, match=r"^between = '<\|end\|>': no file has this line"):
        convert_text([text], tmp_path / "s.h5", "bytes", test=[test_file], between="<|end|>")
    assert not (tmp_path / "s.h5").exists()
    convert_text([text], tmp_path / "s.h5", "bytes", test=[test_file], between="<|end|> ")
    assert tokens(tmp_path / "s.h5", "train") == packed("one<|end|>two\n", "three\n")


def test_objects(tmp_path: Path, test_file: Path) -> None:
    texts = ["one\n\nline", "", "été\u2028\r\n", "x"]
    lines = [json.dumps({"id": i, "text": text}) for i, text in enumerate(texts)]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, "", ""]))
    convert_text([tmp_path / "a.jsonl"], tmp_path / "s.h5", "bytes", test=[test_file], between="line")
    assert tokens(tmp_path / "s.h5", "train") == packed(texts[0], *texts[2:])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "x"', r"a\.jsonl: line 2: no JSON \("),
        (b'"text"', r'a\.jsonl: line 2: expected an object with a string as its "text"'),
        (b'{"text": 3}', r'a\.jsonl: line 2: expected an object with a string as its "text"'),
        (b'{"text": "\xff"}', r"a\.jsonl: line 2: byte 10: not UTF-8"),
        (b'{"text": "a\\u0000"}', r"a\.jsonl: line 2: byte 1 is 0: no text"),
        (b'{"text": "a\\ud83d"}', r'line 2: character 1 of its "text" is half of a surrogate pair'),
        (b'{"n": ' + b"9" * 5000 + b"}", r"a\.jsonl: line 2: no JSON \("),
        (b"[" * 100_000, r"a\.jsonl: line 2: no JSON \(too many lists"),
    ],
)
def test_bad_objects(tmp_path: Path, test_file: Path, line: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "x"}\n' + line + b"\n")
    with pytest.raises(UserError, match=message):
        convert_text([tmp_path / "a.jsonl"], tmp_path / "s.h5", "bytes", test=[test_file])
    assert not (tmp_path / "s.h5").exists()


def test_every_hundredth_document_is_held_out(tmp_path: Path) -> None:
    write(tmp_path, a="\n\n".join(f"document {i}" for i in range(1, 251)))
    convert_text([tmp_path / "a.txt"], tmp_path / "s.h5", "bytes", between="")
    assert tokens(tmp_path / "s.h5", "test") == packed("document 100\n", "document 200\n")
    trained = packed(*(f"document {i}\n" for i in range(1, 251) if i % 100))
    assert tokens(tmp_path / "s.h5", "train") == trained


def whole_characters(_: ByteTokenizer, given: Sequence[bytes]) -> list[NDArray[np.uint8]]:
    assert all(text.decode() is not None for text in given)
    return [np.frombuffer(text, np.uint8) for text in given]


texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=60)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(documents=st.lists(texts, min_size=1, max_size=6), piece=st.integers(1, 30), shard=st.integers(1, 5))
def test_pieces_and_shards_leave_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, documents: list[str], piece: int, shard: int
) -> None:
    """The tokens do not depend on the sizes of segments and shards, and no character is cut."""
    monkeypatch.setattr("hpcsgd.data.texts.SEGMENT", piece)
    monkeypatch.setattr("hpcsgd.data.token_segments.SHARD", 8 * shard)
    monkeypatch.setattr("hpcsgd.data.token_segments.BLOCK", 4)
    monkeypatch.setattr(ByteTokenizer, "encode", whole_characters)
    whole = []
    for i, document in enumerate(documents):
        (tmp_path / f"{i}.txt").write_bytes(document.encode())
        whole += [document] if document else []
    sources = [tmp_path / f"{i}.txt" for i in range(len(documents))]
    (tmp_path / "held").write_text("held out")
    if not whole:
        with pytest.raises(UserError, match="there is no text to train on"):
            convert_text(sources, tmp_path / "s.h5", "bytes", test=[tmp_path / "held"])
        return
    convert_text(sources, tmp_path / "s.h5", "bytes", test=[tmp_path / "held"])
    assert tokens(tmp_path / "s.h5", "train") == packed(*whole)


def test_neither_text_nor_tokens_have_to_fit_into_memory(
    tmp_path: Path, test_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcsgd.data.texts.SEGMENT", 1 << 14)
    monkeypatch.setattr("hpcsgd.data.formats.streams.BLOCK", 1 << 14)
    monkeypatch.setattr("hpcsgd.data.token_segments.SHARD", 1 << 16)
    lines = [f"line {i}, as long as those of a text are, more or less." for i in range(20)]
    (tmp_path / "a.txt").write_text("".join(f"{line}\n" * (1 << 11) for line in lines))
    size = (tmp_path / "a.txt").stat().st_size
    for between in (None, lines[3]):
        tracemalloc.start()
        convert_text([tmp_path / "a.txt"], tmp_path / "s.h5", "bytes", test=[test_file], between=between)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < size / 4, between


def test_what_cannot_be(tmp_path: Path, test_file: Path) -> None:
    (text,) = write(tmp_path, a="text")
    with pytest.raises(UserError, match=r"gone\.txt: no such file or folder; a text file, or a folder"):
        convert_text([tmp_path / "gone.txt"], tmp_path / "s.h5", "bytes", test=[test_file])
    with pytest.raises(
        UserError, match=r"held\.txt: there already, and no dataset file; the last path is the dataset file"
    ):
        convert_text([text], test_file, "bytes", test=[test_file])
    assert test_file.read_text() == "to test on"
    with pytest.raises(UserError, match="1 of the 100 documents of which one is held out for testing: name"):
        convert_text([text], tmp_path / "s.h5", "bytes")
    with pytest.raises(UserError, match="is a folder"):
        convert_text([text], tmp_path, "bytes", test=[test_file])
    (tmp_path / "b.bin").write_bytes(b"a\0")
    with pytest.raises(UserError, match=r"b\.bin: after byte 1: byte 0 is 0: no text"):
        convert_text([tmp_path / "b.bin"], tmp_path / "s.h5", "bytes", test=[test_file])
    assert not (tmp_path / "s.h5").exists()
