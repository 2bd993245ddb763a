"""What makes tokens of text, and text of tokens again: words, bytes, or a file of the library `tokenizers`.

A store of tokens holds what made it, so that text can be made of what a model says, and tokens of what it is
asked.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hpcsgd.errors import UserError

ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]")
"""Tokens that end a document, as they are called."""
EOS, UNKNOWN = "<eos>", "<unk>"


class Tokenizer(Protocol):
    """Tokens are numbers from 0 up to `types`; `end` follows each document."""

    @property
    def name(self) -> str:
        """In `TOKENIZERS`."""
        ...

    @property
    def definition(self) -> bytes:
        """Says all but `end`; not empty."""
        ...

    @property
    def types(self) -> int: ...

    @property
    def end(self) -> int: ...

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[Any]]:
        """Of each text its tokens. Raises `UserError` for what is no text, naming the byte."""
        ...

    def decode(self, tokens: Iterable[int]) -> str: ...

    def pretrained_files(self) -> Mapping[str, bytes]:
        """Return the files, by name, from which `AutoTokenizer` of the library `transformers` makes this
        tokenizer; an empty mapping where that library has no tokenizer of this kind."""
        ...


class Bytes:
    """A token is a byte of UTF-8; 0, which no text has, ends a document."""

    name = "bytes"
    definition = b"bytes; 0 ends a document"
    types = 256
    end = 0

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.uint8]]:
        for text in texts:
            if (place := text.find(0)) >= 0:
                raise UserError(f"byte {place} is 0: no text")
        return [np.frombuffer(text, np.uint8) for text in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    def pretrained_files(self) -> Mapping[str, bytes]:
        return {}


class Words:
    """A token is a word between spaces, of a fixed list, none with a line break in it."""

    name = "words"

    def __init__(self, types: Sequence[str]) -> None:
        self.definition = "\n".join(types).encode()
        self._words = list(types)
        self._places = {word: place for place, word in enumerate(types)}
        self.end = self._places.get(EOS, 0)

    @property
    def types(self) -> int:
        return len(self._words)

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.int64]]:
        return [np.array([self._place(word) for word in decoded(text).split()], np.int64) for text in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        return " ".join(self._words[token] for token in tokens)

    def pretrained_files(self) -> Mapping[str, bytes]:
        return {}

    def _place(self, word: str) -> int:
        place = self._places.get(word, self._places.get(UNKNOWN))
        if place is None:
            raise UserError(f"the word {word!r} is not among the {self.types} types")
        return place


class Library:
    """What a `tokenizer.json` of the library `tokenizers` says; what it may say of padding is left aside."""

    name = "tokenizers"

    def __init__(self, definition: bytes, end: int) -> None:
        self.definition, self.end = definition, end
        self._made = _library_tokenizer(definition)
        self.types = max(self._made.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.uint32]]:
        read = self._made.encode_batch([decoded(text) for text in texts], add_special_tokens=False)
        return [np.array(each.ids, np.uint32) for each in read]

    def decode(self, tokens: Iterable[int]) -> str:
        return self._made.decode(list(tokens), skip_special_tokens=False)

    def pretrained_files(self) -> Mapping[str, bytes]:
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self.decode([self.end])}
        text = json.dumps(config, indent=1) + "\n"
        return {"tokenizer.json": self.definition, "tokenizer_config.json": text.encode()}


TOKENIZERS: Mapping[str, Callable[[bytes, int], Tokenizer]] = {
    Bytes.name: lambda definition, end: Bytes(),
    Words.name: lambda definition, end: Words(definition.decode().split("\n")),
    Library.name: Library,
}
"""By the name in a store: made of what the store says."""


def tokenizer_of(given: str, end: str | None = None) -> Tokenizer:
    """That of "bytes", or of a file; `end` is what the token is called there, where it is none of `ENDS`.

    Raises `UserError` where there is no such file, the library cannot read it, or has no such token.
    """
    if given == Bytes.name:
        if end is not None:
            raise UserError(f"end = {end!r}: the tokenizer 'bytes' has one of its own", key="end", value=end)
        return Bytes()
    definition = definition_of(given)
    try:
        return Library(definition, _end(_library_tokenizer(definition), end))
    except UserError as error:
        raise UserError(f"tokenizer {given}: {error}") from error


def definition_of(given: str) -> bytes:
    """What "bytes", or a file, says of itself; raises `UserError` where there is no such file."""
    if given == Bytes.name:
        return Bytes.definition
    try:
        return Path(given).read_bytes()
    except OSError as error:
        raise UserError(
            f"tokenizer {given!r}: neither 'bytes' nor a file that can be read ({error.strerror})"
        ) from error


def fingerprint(definition: bytes) -> str:
    """Short, and of no other one."""
    return hashlib.sha256(definition).hexdigest()[:12]


def decoded(text: bytes) -> str:
    """Raises `UserError` where it is not UTF-8."""
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"byte {error.start}: not UTF-8 ({error.reason})") from error


def _library_tokenizer(definition: bytes) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise UserError('needs the library `tokenizers`: pip install "hpcsgd[text]"') from error
    try:
        made = tokenizers.Tokenizer.from_buffer(definition)
    except Exception as error:
        raise UserError(f"not a file of the library `tokenizers` ({error})") from error
    made.no_truncation()
    made.no_padding()
    return made


def _end(made: Any, given: str | None) -> int:
    names = ENDS if given is None else (given,)
    found = [token for name in names if (token := made.token_to_id(name)) is not None]
    if not found:
        raise UserError(f"has no token {' or '.join(names)} to end a document: name the one it has by --end")
    return found[0]
