"""Tokenizers: words, bytes, or a file of the library `tokenizers`.

A dataset file of tokens includes its tokenizer, so that a model's tokens can be decoded, and its prompts
encoded.
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
"""Names of tokens that end a document."""
EOS, UNKNOWN = "<eos>", "<unk>"


class Tokenizer(Protocol):
    """A tokenizer, which converts texts to numbers from 0 to `types` − 1; `end` follows each document."""

    @property
    def name(self) -> str:
        """The key of this tokenizer in `TOKENIZERS`."""
        ...

    @property
    def definition(self) -> bytes:
        """All properties of the tokenizer except `end`, as bytes; not empty."""
        ...

    @property
    def types(self) -> int: ...

    @property
    def end(self) -> int: ...

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[Any]]:
        """Return the tokens of each text. Raises `UserError`, which names the byte, if one is not text."""
        ...

    def decode(self, tokens: Iterable[int]) -> str: ...

    def pretrained_files(self) -> Mapping[str, bytes]:
        """Return the files, by name, from which `AutoTokenizer` of `transformers` makes this tokenizer.

        The mapping is empty if that library has no such tokenizer.
        """
        ...


class ByteTokenizer:
    """A tokenizer whose tokens are bytes of UTF-8; 0, which no text has, ends a document."""

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


class WordTokenizer:
    """A tokenizer whose tokens are words between spaces, from a fixed list without line breaks."""

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


class LibraryTokenizer:
    """A tokenizer of the library `tokenizers`, from its `tokenizer.json`, whose padding is ignored."""

    name = "tokenizers"

    def __init__(self, definition: bytes, end: int) -> None:
        self.definition, self.end = definition, end
        self._made = _library_tokenizer(definition)
        self.types = max(self._made.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.uint32]]:
        plain = [decoded(text) for text in texts]
        try:
            read = self._made.encode_batch(plain, add_special_tokens=False)
        except Exception as error:  # the library has no class of its own
            raise UserError(f"the tokenizer cannot encode this text ({error})") from error
        return [np.array(each.ids, np.uint32) for each in read]

    def decode(self, tokens: Iterable[int]) -> str:
        return self._made.decode(list(tokens), skip_special_tokens=False)

    def pretrained_files(self) -> Mapping[str, bytes]:
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self.decode([self.end])}
        text = json.dumps(config, indent=1) + "\n"
        return {"tokenizer.json": self.definition, "tokenizer_config.json": text.encode()}


TOKENIZERS: Mapping[str, Callable[[bytes, int], Tokenizer]] = {
    ByteTokenizer.name: lambda definition, end: ByteTokenizer(),
    WordTokenizer.name: lambda definition, end: WordTokenizer(definition.decode().split("\n")),
    LibraryTokenizer.name: LibraryTokenizer,
}
"""Functions that make a tokenizer from its definition and its end token, by the tokenizer's name."""


def tokenizer_of(given: str, end: str | None = None) -> Tokenizer:
    """Return the tokenizer `given`: "bytes", or the path of a file of the library `tokenizers`.

    `end` is the name of the file's end token, by default the first of `ENDS` that the file has. Raises
    `UserError` if there is no such file, the library cannot read it, or it has no such token.
    """
    if given == ByteTokenizer.name:
        if end is not None:
            raise UserError(f"end = {end!r}: the tokenizer 'bytes' has one of its own", key="end", value=end)
        return ByteTokenizer()
    definition = definition_of(given)
    try:
        return LibraryTokenizer(definition, _end(_library_tokenizer(definition), end))
    except UserError as error:
        raise UserError(f"tokenizer {given}: {error}") from error


def definition_of(given: str) -> bytes:
    """Return the definition of the tokenizer `given`: "bytes", or the path of a file, which is read.

    Raises `UserError` if the file cannot be read.
    """
    if given == ByteTokenizer.name:
        return ByteTokenizer.definition
    try:
        return Path(given).read_bytes()
    except OSError as error:
        raise UserError(
            f"tokenizer {given!r}: neither 'bytes' nor a file that can be read ({error.strerror})"
        ) from error


def fingerprint(definition: bytes) -> str:
    """Return a short text that identifies the tokenizer with this definition."""
    return hashlib.sha256(definition).hexdigest()[:12]


def decoded(text: bytes) -> str:
    """Return the bytes `text` as a string. Raises `UserError` if they are not UTF-8."""
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
