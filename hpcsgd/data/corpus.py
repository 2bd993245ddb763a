"""A text, as tokens that are to be written to a dataset file, and the vocabulary of the tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from hpcsgd.data import token_segments
from hpcsgd.data.layout import label, open_dataset_file
from hpcsgd.data.tokenizers import TOKENIZERS, Tokenizer, WordTokenizer
from hpcsgd.errors import UserError

BYTES_A_CHUNK = 1 << 16


@dataclass(frozen=True)
class Vocabulary:
    """The header of a dataset file of tokens: the collection `kind` and the tokenizer that was used.

    The tokenizer is described by `name` and `definition`, and has `types` types of tokens. Its token `end`
    follows each document.
    """

    kind: str
    name: str
    types: int
    end: int
    definition: bytes

    @staticmethod
    def of(tokenizer: Tokenizer, kind: str) -> Vocabulary:
        return Vocabulary(kind, tokenizer.name, tokenizer.types, tokenizer.end, tokenizer.definition)

    @property
    def holds(self) -> str:
        """A description of the file's content, for the output of `convert`."""
        return f"{self.types} types"

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer that made the tokens. Raises `UserError` if its library is missing."""
        return TOKENIZERS[self.name](self.definition, self.end)

    def write(self, file: h5py.File) -> None:
        label(file, "tokens", kind=self.kind, tokenizer=self.name)
        file.attrs.update({"types": self.types, "end": self.end})
        text = np.frombuffer(self.definition, np.uint8)
        file.create_dataset("definition", data=text, chunks=(min(len(text), BYTES_A_CHUNK),), fletcher32=True)

    @staticmethod
    def read(file: h5py.File) -> Vocabulary:
        """Read the vocabulary of `file`.

        Raises `KeyError` if a part of the vocabulary is missing, and `OSError` if one is damaged.
        """
        attributes: dict[str, Any] = dict(file.attrs)
        return Vocabulary(
            attributes["kind"].decode(),
            attributes["tokenizer"].decode(),
            int(attributes["types"]),
            int(attributes["end"]),
            np.asarray(file["definition"]).tobytes(),
        )


def tokenizer_of_file(path: Path) -> Tokenizer:
    """Return the tokenizer that made the dataset file of tokens at `path`.

    Raises `UserError` if there is no such file, or its vocabulary is damaged.
    """
    with open_dataset_file(path, "tokens") as file:
        try:
            vocabulary = Vocabulary.read(file)
        except (OSError, RuntimeError, KeyError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: the vocabulary cannot be read ({error}); convert it again") from error
    return vocabulary.tokenizer()


@dataclass(frozen=True)
class Corpus:
    """A text that was read: `types` are its words, without line breaks.

    `tokens` are the tokens of each split, int32 [n], as indices into `types`. No split is empty.
    """

    types: tuple[str, ...]
    tokens: Mapping[str, NDArray[np.int32]]

    @property
    def rows(self) -> Mapping[str, int]:
        """Number of tokens of each split."""
        return {split: len(tokens) for split, tokens in self.tokens.items()}

    def write(self, file: h5py.File, kind: str) -> Vocabulary:
        """Write the text to `file`, a new dataset file of the collection `kind`, and return its header."""
        vocabulary = Vocabulary.of(WordTokenizer(self.types), kind)
        vocabulary.write(file)
        for split, tokens in self.tokens.items():
            writer = token_segments.Writer(file.create_group(split), vocabulary.types)
            writer.append(tokens)
            writer.finish()
        return vocabulary
