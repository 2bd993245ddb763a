"""WikiText-2 and WikiText-103 as distributed: `wiki.{train,valid,test}.tokens`.

"Pointer Sentinel Mixture Models" (Merity et al., 2016), https://arxiv.org/abs/1609.07843: lines of words
between spaces, in which rare words are already `<unk>`. Every line ends with the word `<eos>`, which is not
in the files. With this word the authors count 2,088,628 tokens and 33,278 types in WikiText-2.
"""

from __future__ import annotations

from array import array
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpcsgd.data.corpus import Corpus
from hpcsgd.data.formats.streams import InputStream, existing, opened
from hpcsgd.errors import UserError

END = "<eos>"
SPLITS = ("train", "valid", "test")


def read(source: Path | None) -> Corpus:
    """Return the text of the three files in the folder `source`, with types in order of first use.

    Raises `UserError` for a file that is missing, empty, or not UTF-8 in some line.
    """
    folder = existing(source, "the folder with wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens")
    places: dict[str, int] = {}
    tokens = {split: _tokens(folder / f"wiki.{split}.tokens", places) for split in SPLITS}
    return Corpus(tuple(places), tokens)


def _tokens(path: Path, places: dict[str, int]) -> NDArray[np.int32]:
    """Return the tokens of a file; add new words, with the next free numbers as tokens, to `places`."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; the folder that WikiText unpacks to is needed")
    found = array("i")
    with opened(path) as stream:
        for number, line in enumerate(stream.lines(), start=1):
            words = [*_text(line, stream, number).split(), END]
            found.extend([places.setdefault(word, len(places)) for word in words])
    if not found:
        raise UserError(f"{path}: nothing in it")
    return np.frombuffer(found, np.int32)


def _text(line: bytes, stream: InputStream, number: int) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{stream.name}: line {number}: not UTF-8 ({error.reason})") from error
