from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcsgd.data import Windows, convert_text
from hpcsgd.data.tokenizers import ByteTokenizer, LibraryTokenizer, WordTokenizer, tokenizer_of
from hpcsgd.errors import UserError

TEXT = "the cat sees été, the dog hears it.\n" * 40


def write_tokenizer(folder: Path, *, types: int = 300, end: str = "<|endoftext|>") -> Path:
    """Write a small tokenizer of the library and return its path, or skip the test.

    It pads, truncates and begins each text with a token, as many published tokenizers do.
    """
    library: Any = pytest.importorskip("tokenizers")
    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    trainer = library.trainers.BpeTrainer(
        vocab_size=types, special_tokens=[end], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([TEXT], trainer)
    made.post_processor = library.processors.TemplateProcessing(
        single=f"{end} $A", special_tokens=[(end, made.token_to_id(end))]
    )
    made.enable_truncation(5)
    made.enable_padding(length=64)
    made.save(str(folder / f"bpe{types}.json"))
    return folder / f"bpe{types}.json"


def test_bytes() -> None:
    made = tokenizer_of("bytes")
    assert isinstance(made, ByteTokenizer)
    texts = ["été\n".encode(), b"", b"a b"]
    assert [tokens.tolist() for tokens in made.encode(texts)] == [list(text) for text in texts]
    assert made.decode("été\n".encode()) == "été\n"
    assert made.decode([0xC3]) == "\N{REPLACEMENT CHARACTER}"
    with pytest.raises(UserError, match="byte 2 is 0: no text"):
        made.encode([b"ab\0c"])


def test_words() -> None:
    made = WordTokenizer(["<unk>", "a", "<eos>"])
    assert (made.types, made.end) == (3, 2)
    assert made.encode([b"a b\n a", b""])[0].tolist() == [1, 0, 1]
    assert made.decode([1, 2, 0]) == "a <eos> <unk>"
    with pytest.raises(UserError, match="the word 'b' is not among the 1 types"):
        WordTokenizer(["a"]).encode([b"b"])


def test_a_file_of_the_library(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path)
    made = tokenizer_of(str(path))
    assert isinstance(made, LibraryTokenizer)
    assert made.types == len(json.loads(path.read_text())["model"]["vocab"])
    texts = [TEXT.encode(), "neither été nor 狗\n".encode()]
    tokens = made.encode(texts)
    assert [made.decode(some.tolist()).encode() for some in tokens] == texts, "neither padded nor truncated"
    assert len(tokens[0]) < len(texts[0]) / 3
    assert made.decode([made.end]) == "<|endoftext|>"
    with pytest.raises(UserError, match="byte 1: not UTF-8"):
        made.encode([b"a\xff"])
    files = made.pretrained_files()
    assert files["tokenizer.json"] == path.read_bytes()
    assert json.loads(files["tokenizer_config.json"])["eos_token"] == "<|endoftext|>"


def test_the_library_transformers_has_none_of_words_or_bytes() -> None:
    assert [each.pretrained_files() for each in (ByteTokenizer(), WordTokenizer(["a"]))] == [{}, {}]


def test_how_a_document_ends(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path, end="<over>")
    with pytest.raises(UserError, match=r"has no token <\|endoftext\|> or .* name the one it has by --end"):
        tokenizer_of(str(path))
    with pytest.raises(UserError, match="has no token <end> to end"):
        tokenizer_of(str(path), "<end>")
    made = tokenizer_of(str(path), "<over>")
    assert made.decode([made.end]) == "<over>"
    with pytest.raises(UserError, match="end = 'x': the tokenizer 'bytes' has one of its own"):
        tokenizer_of("bytes", "x")


def test_the_store_keeps_it(tmp_path: Path) -> None:
    """The dataset file still has its tokenizer after the tokenizer's file is gone."""
    path = write_tokenizer(tmp_path)
    (tmp_path / "a.txt").write_text(TEXT)
    convert_text([tmp_path / "a.txt"], tmp_path / "a.h5", str(path), test=[tmp_path / "a.txt"])
    expected = tokenizer_of(str(path))
    path.unlink()
    data = Windows(tmp_path / "a.h5", "train", bptt=1)
    tokens = [int(x) for x, _ in data]
    assert data.tokenizer.decode(tokens) == TEXT
    assert (data.types, data.tokenizer.end) == (expected.types, expected.end)
    assert int(data[len(data) - 1][1]) == expected.end


def test_what_is_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="tokenizer 'byte': neither 'bytes' nor a file that can be read"):
        tokenizer_of("byte")
    pytest.importorskip("tokenizers")
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(UserError, match=r"t\.json: not a file of the library `tokenizers` \("):
        tokenizer_of(str(tmp_path / "t.json"))


def test_a_word_that_the_tokenizer_lacks(tmp_path: Path) -> None:
    library: Any = pytest.importorskip("tokenizers")
    made = library.Tokenizer(library.models.WordLevel({"a": 0, "</s>": 1}, unk_token="[UNK]"))
    made.pre_tokenizer = library.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "t.json"))
    (tmp_path / "a.txt").write_text("a a\n")
    (tmp_path / "b.txt").write_text("a b\n")
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    with pytest.raises(
        UserError, match=r"b\.txt: after byte 0: the tokenizer cannot encode this text \(Word"
    ):
        convert_text(files, tmp_path / "s.h5", str(tmp_path / "t.json"), test=files)


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(UserError, match=r't\.json: needs the library .* pip install "hpcsgd\[text\]"'):
        tokenizer_of(str(tmp_path / "t.json"))
    (tmp_path / "a.txt").write_text(TEXT)
    convert_text([tmp_path / "a.txt"], tmp_path / "a.h5", "bytes", test=[tmp_path / "a.txt"])
    assert len(Windows(tmp_path / "a.h5", "train")) == len(TEXT.encode()) // 35


def test_another_one_than_that_of_the_store(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "other.json").write_text("{}")
    convert_text([tmp_path / "a.txt"], tmp_path / "a.h5", "bytes", test=[tmp_path / "a.txt"])
    assert len(Windows(tmp_path / "a.h5", "test", tokenizer="bytes"))
    with pytest.raises(UserError) as caught:
        Windows(tmp_path / "a.h5", "train", tokenizer=str(tmp_path / "other.json"))
    assert str(caught.value) == (
        f"tokenizer {tmp_path}/other.json (44136fa355b3) is not the one that made {tmp_path}/a.h5: bytes, "
        "256 types (1a78bd000668); convert the text again"
    )
    with pytest.raises(UserError, match=r"tokenizer 'gone\.json': neither 'bytes' nor a file"):
        Windows(tmp_path / "a.h5", "train", tokenizer="gone.json")


def test_tokens_lie_in_as_few_bytes_as_they_need(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT * 100)
    sizes = {}
    for name, given in {"bytes": "bytes", "bpe": str(write_tokenizer(tmp_path))}.items():
        made = convert_text([tmp_path / "a.txt"], tmp_path / "a.h5", given, test=[tmp_path / "a.txt"])
        sizes[name] = made.bytes / sum(made.rows.values())
    assert sizes["bytes"] == pytest.approx(1, abs=0.1)
    assert 2 < sizes["bpe"] < 3
