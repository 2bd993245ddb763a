"""A text as samples for a language model: windows of a fixed length, each independent of the others.

Windows are cut from the text as it stands, across the ends of documents, so that no token is lost to
padding.

Training on a text as a stream (truncated back-propagation through time) is different: it carries the state
of a recurrent network from one window to the next, in the order of the text. Here windows are samples like
any others. They come in any order, on any rank, and are assigned, shared and resumed like images.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpcsgd.data import token_segments
from hpcsgd.data.corpus import Vocabulary
from hpcsgd.data.layout import open_dataset_file
from hpcsgd.data.split import Batch, Split, damaged
from hpcsgd.data.tokenizers import TOKENIZERS, Tokenizer, definition_of, fingerprint
from hpcsgd.errors import UserError, count_text, near_miss

IGNORED = -100
"""A target that does not count in the loss; it is the default of torch's cross-entropy."""


class Windows(Split):
    """One split of a dataset file of tokens: x int64 [bptt], and y int64 [bptt] with the next tokens.

    Sample i begins at token i · bptt. In `train` the rest at the end, less than a window, is left out. In
    all other splits every token except the first is a target exactly once: the last window ends with the
    text, and targets that the window before it has already are `IGNORED`.

    `tokenizer`, "bytes" or a file, must be the one that made the dataset file.

    Raises `UserError` if there is no such file or split, the file has no tokens, was made with another
    tokenizer, or is shorter than a window. Reading samples raises `UserError` if the file is damaged.
    """

    def __init__(self, path: str | Path, split: str, bptt: int = 35, tokenizer: str | None = None) -> None:
        super().__init__(path, split, "tokens")
        if bptt < 1:
            raise UserError(f"bptt = {bptt}: a window has at least 1 token", key="bptt", value=bptt)
        self.header, self.tokens, self.bytes = _read_header(self.path, split)
        if tokenizer is not None:
            self._require(tokenizer)
        self.bptt = bptt
        whole, rest = divmod(self.tokens - 1, bptt)
        if whole < 1:
            raise UserError(
                f"bptt = {bptt}: the {count_text(self.tokens, 'token')} of split {split!r} of {self.path} "
                "are too few",
                key="bptt",
                value=bptt,
            )
        self._count = whole + (split != "train" and rest > 0)
        self._shards = token_segments.TokenSegments(self.path, split, self.tokens, self.header.types)

    @property
    def types(self) -> int:
        """Number of types of tokens; tokens are 0 to `types` − 1."""
        return self.header.types

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the dataset file."""
        return self.header.tokenizer()

    @property
    def labels(self) -> None:
        """Windows have no labels."""
        return None

    @property
    def run_length(self) -> int:
        """Number of neighbouring windows that are read together (`Stream`)."""
        return max(1, token_segments.RUN // self.bptt)

    def expect(self, rows: NDArray[np.int64]) -> None:
        """Announce that `rows` will be read soon (`Stream`)."""
        self._shards.expect(rows * self.bptt)

    def __len__(self) -> int:
        return self._count

    def trial(self) -> Tensor:
        """Return two windows to test a model: one has only token 0, the other only token `types` − 1."""
        return torch.tensor([[0], [self.types - 1]]).expand(-1, self.bptt)

    def _read(self, indices: Sequence[int]) -> Batch:
        starts = np.asarray(indices, np.int64) * self.bptt
        missing = max(self._count * self.bptt + 1 - self.tokens, 0)  # tokens of the last window
        short = [row for row, i in enumerate(indices) if i == self._count - 1] if missing else []
        if short:
            starts[short] -= missing
        windows = self._shards.windows(starts, self.bptt + 1)
        x = torch.from_numpy(windows[:, :-1].astype(np.int64))
        y = torch.from_numpy(windows[:, 1:].astype(np.int64))
        if short:
            y[short, :missing] = IGNORED
        return Batch(x, y)

    def _require(self, tokenizer: str) -> None:
        wanted, held = definition_of(tokenizer), self.header
        if wanted != held.definition:
            raise UserError(
                f"tokenizer {tokenizer} ({fingerprint(wanted)}) is not the one that made {self.path}: "
                f"{held.name}, {held.types} types ({fingerprint(held.definition)}); convert the text again"
            )


def _read_header(path: Path, split: str) -> tuple[Vocabulary, int, int | None]:
    """Return the vocabulary, and the split's number of tokens and of bytes of text, or None if unknown."""
    with open_dataset_file(path, "tokens") as file:
        splits = [name for name, value in file.items() if isinstance(value, h5py.Group)]
        if split not in splits:
            raise UserError(f"{path}: no split {split!r}; {near_miss(split, splits)}")
        try:
            vocabulary = Vocabulary.read(file)
            attributes: dict[str, Any] = dict(file[split].attrs)
            tokens, size = int(attributes["tokens"]), attributes.get("bytes")
        except (OSError, RuntimeError, KeyError, UnicodeDecodeError) as error:
            raise damaged(path, split, f"header or vocabulary cannot be read ({error})") from error
    if vocabulary.name not in TOKENIZERS:
        raise UserError(f"{path}: made with a tokenizer {vocabulary.name!r} that is not known here")
    return vocabulary, tokens, None if size is None else int(size)
