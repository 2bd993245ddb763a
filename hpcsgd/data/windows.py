"""A text as samples for a language model: windows of a fixed length, each to be known from itself alone.

Difference from training on a text as a stream (truncated back-propagation through time): there the state of a
recurrent network is carried from one window to the next, in the order of the text. Here windows are samples
like any others: in any order, on any rank, dealt, shared and resumed as images are.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from hpcsgd.data.corpus import BLOCK, TOKEN, Vocabulary
from hpcsgd.data.layout import dataset, open_store
from hpcsgd.data.split import Batch, Split, damaged
from hpcsgd.errors import UserError, near_miss

IGNORED = -100
"""The target that counts for nothing, as torch's cross-entropy has it."""


class Windows(Split):
    """One split of a store of tokens: x int64 [bptt], and y int64 [bptt], the token after each of x.

    Sample i begins at token i · bptt. In `train` what is left at the end, less than a window, is left out. In
    all other splits every token but the first is asked for exactly once: the last window ends with the text,
    and what the one before asks for is `IGNORED` in its y.

    Raises `UserError` if there is no such file or split, the file is no store of tokens, or shorter than a
    window, and, when reading, where it is damaged.
    """

    def __init__(self, path: str | Path, split: str, bptt: int = 35) -> None:
        super().__init__(path, split, "tokens")
        if bptt < 1:
            raise UserError(f"bptt = {bptt}: a window has at least 1 token")
        self.header, self.tokens = _read_header(self.path, split)
        self.bptt = bptt
        whole, rest = divmod(self.tokens - 1, bptt)
        if not whole:
            raise UserError(
                f"bptt = {bptt}: the {self.tokens} tokens of split {split!r} of {self.path} are too few"
            )
        self._count = whole + (split != "train" and rest > 0)

    @property
    def types(self) -> tuple[str, ...]:
        """The vocabulary: what tokens 0, 1, … stand for."""
        return self.header.types

    @property
    def labels(self) -> None:
        """Windows have none."""
        return None

    def __len__(self) -> int:
        return self._count

    def trial(self) -> Tensor:
        """One of the first token, one of the last."""
        return torch.tensor([[0], [len(self.types) - 1]]).expand(-1, self.bptt)

    def vary(self, x: Tensor, y: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        """As they are."""
        return x, y

    def _read(self, indices: Sequence[int]) -> Batch:
        begins = np.asarray(indices, np.int64)[:, None] * self.bptt
        starts = np.minimum(begins, self.tokens - 1 - self.bptt)
        places = starts + np.arange(self.bptt + 1)
        window = torch.from_numpy(self._at(places))
        asked_before = torch.from_numpy(places[:, :-1] < begins)
        return Batch(window[:, :-1].contiguous(), window[:, 1:].masked_fill(asked_before, IGNORED))

    def _at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The tokens there."""
        needed, which = np.unique(places // BLOCK, return_inverse=True)
        blocks = self._rows(needed.tolist()).view(TOKEN)
        return blocks[which.reshape(places.shape), places % BLOCK].astype(np.int64)


def _read_header(path: Path, split: str) -> tuple[Vocabulary, int]:
    """The vocabulary, and how many tokens the split has."""
    with open_store(path, "tokens") as file:
        splits = [name for name, value in file.items() if isinstance(value, h5py.Group)]
        if split not in splits:
            raise UserError(f"{path}: no split {split!r}; {near_miss(split, splits)}")
        try:
            vocabulary = Vocabulary.read(file)
            tokens = int(file[split].attrs["tokens"])  # pyright: ignore[reportArgumentType]
            blocks = dataset(file, f"{split}/x")
        except (OSError, RuntimeError, KeyError, UnicodeDecodeError) as error:
            raise damaged(path, split, f"header or vocabulary cannot be read ({error})") from error
        form = blocks.shape, blocks.chunks, blocks.dtype
        if form != ((-(-tokens // BLOCK), BLOCK), (1, BLOCK), TOKEN):
            raise damaged(path, split, f"{tokens} tokens in blocks {blocks.shape} of {blocks.dtype}")
    return vocabulary, tokens
