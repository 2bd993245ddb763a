from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data.originals import write_wikitext
from hpcsgd.data import Windows, convert
from hpcsgd.data.formats import wikitext
from hpcsgd.errors import UserError

TEXTS = {"train": " \n = one = \n \n two one <unk>\tone\n", "valid": " three \n", "test": "one four"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for split, text in TEXTS.items():
        (tmp_path / f"wiki.{split}.tokens").write_text(text)
    return tmp_path


def test_tokens_and_types(folder: Path) -> None:
    corpus = wikitext.read(folder)
    assert corpus.types == ("<eos>", "=", "one", "two", "<unk>", "three", "four")
    words = {split: [corpus.types[i] for i in tokens] for split, tokens in corpus.tokens.items()}
    assert words == {
        "train": ["<eos>", "=", "one", "=", "<eos>", "<eos>", "two", "one", "<unk>", "one", "<eos>"],
        "valid": ["three", "<eos>"],
        "test": ["one", "four", "<eos>"],
    }


def test_what_the_store_has(tmp_path: Path) -> None:
    corpus = wikitext.read(write_wikitext(tmp_path / "words", {"train": 300, "valid": 3, "test": 4}))
    summary = convert("wikitext", tmp_path / "words", tmp_path / "store.h5")
    text = "store.h5: wikitext, 2100 train, 21 valid, 28 test, 14 types, 0.0 MB"
    assert str(summary).endswith(text)
    for split, tokens in corpus.tokens.items():
        data = Windows(tmp_path / "store.h5", split, bptt=1)
        assert data.types == len(corpus.types)
        assert data.tokenizer.decode(range(data.types)) == " ".join(corpus.types)
        assert data.header.kind == "wikitext"
        x, y = zip(*data, strict=True)
        assert [int(i) for i in x] == tokens[:-1].tolist()
        assert [int(i) for i in y] == tokens[1:].tolist()


def test_compressed_files_and_lines_across_reads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = wikitext.read(folder)
    monkeypatch.setattr("hpcsgd.data.formats.streams.BLOCK", 3)
    train = folder / "wiki.train.tokens"
    train.write_bytes(gzip.compress(train.read_bytes()))
    found = wikitext.read(folder)
    assert found.types == expected.types
    assert all(np.array_equal(found.tokens[split], tokens) for split, tokens in expected.tokens.items())


def test_malformed_files(folder: Path) -> None:
    valid = folder / "wiki.valid.tokens"
    valid.write_bytes(b"good\nb\xffd\n")
    with pytest.raises(UserError, match=r"wiki\.valid\.tokens: line 2: not UTF-8"):
        wikitext.read(folder)
    valid.write_bytes(b"")
    with pytest.raises(UserError, match=r"wiki\.valid\.tokens: nothing in it"):
        wikitext.read(folder)
    valid.unlink()
    with pytest.raises(UserError, match=r"wiki\.valid\.tokens: no such file; the folder that WikiText"):
        wikitext.read(folder)
    with pytest.raises(UserError, match=r"no source given: the folder with wiki\.train\.tokens"):
        wikitext.read(None)


@pytest.mark.slow
def test_the_real_one(real_data: Callable[[str], Path], tmp_path: Path) -> None:
    """The counts equal those that its authors give in section 4.3."""
    summary = convert("wikitext", real_data("wikitext-2"), tmp_path / "store.h5")
    assert summary.rows == {"train": 2_088_628, "valid": 217_646, "test": 245_569}
    assert summary.header.types == 33_278
    data = Windows(tmp_path / "store.h5", "train")
    begin = "<eos> = Valkyria Chronicles III = <eos> <eos> Senjō no Valkyria 3 : <unk> Chronicles"
    assert data.tokenizer.decode(data[0][0][:15].tolist()) == begin
