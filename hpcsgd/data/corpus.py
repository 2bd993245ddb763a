"""A text as numbers on its way into a store, and the vocabulary there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import h5py
import numpy as np
from numpy.typing import NDArray

from hpcsgd.data.layout import label

BLOCK = 1024
"""Tokens that are read, and checked, together."""
BYTES_A_CHUNK = 1 << 16
TOKEN = np.dtype("<i4")


@dataclass(frozen=True)
class Vocabulary:
    """What a store of tokens holds: of the collection `kind`, the `types` that tokens 0, 1, … stand for."""

    kind: str
    types: tuple[str, ...]

    @property
    def holds(self) -> str:
        """In words, for whoever has converted it."""
        return f"{len(self.types)} types"

    def write(self, file: h5py.File) -> None:
        label(file, "tokens", kind=self.kind)
        text = np.frombuffer("\n".join(self.types).encode(), np.uint8)
        chunks = (min(len(text), BYTES_A_CHUNK),)
        file.create_dataset("types", data=text, chunks=chunks, fletcher32=True)

    @staticmethod
    def read(file: h5py.File) -> Vocabulary:
        """Raises `KeyError` if something is missing, and `OSError` where it is damaged."""
        text = np.asarray(file["types"]).tobytes().decode()
        kind = str(file.attrs["kind"].decode())  # pyright: ignore[reportAttributeAccessIssue]
        return Vocabulary(kind, tuple(text.split("\n")))


@dataclass(frozen=True)
class Corpus:
    """A text that was read: its `types`, none with a line break in it, and of each split the tokens, int32
    [n], as places in `types`. No split is empty."""

    types: tuple[str, ...]
    tokens: Mapping[str, NDArray[np.int32]]

    @property
    def rows(self) -> Mapping[str, int]:
        """Tokens of each split."""
        return {split: len(tokens) for split, tokens in self.tokens.items()}

    def write(self, file: h5py.File, kind: str) -> Vocabulary:
        """Fill `file` as the store of the collection `kind`."""
        vocabulary = Vocabulary(kind, self.types)
        vocabulary.write(file)
        for split, tokens in self.tokens.items():
            group = file.create_group(split)
            group.attrs["tokens"] = len(tokens)
            blocks = np.pad(tokens.astype(TOKEN), (0, -len(tokens) % BLOCK)).reshape(-1, BLOCK)
            group.create_dataset("x", data=blocks, chunks=(1, BLOCK), fletcher32=True)
        return vocabulary
