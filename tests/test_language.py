"""Checks of the language in hpcsgd: the first lines of docstrings, and words that are no longer used.

`python tests/test_language.py FILE …` prints the faults in files.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GONE = re.compile(
    r"(?<![\w`.-])(meetings?|meets?|met|chunks?|islands?|lanes?|moments|told|said|apart|besides?|foretold|foreseen"
    r"|wish(?:e[sd])?|hands?|dealt|whoever|whose turn|parcels?|ledgers?)(?![\w`])",
    re.IGNORECASE,
)
"""Words that `CONTRIBUTING.md` replaces by others."""
OF_HDF5 = re.compile(r"hpcsgd/(data|files)/.*|hpcsgd/checkpoint/(folder|tree|writer)\.py")
"""Files in which a chunk is one of HDF5."""
FIRST = frozenset({"Of", "Likewise", "It", "That", "Whether"})
TO_DO: frozenset[str] = frozenset()
"""Files that still have to be rewritten. None may be added."""


def product() -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("hpcsgd/**/*.py"))


def faults(file: str, text: str) -> Iterator[str]:
    tree = ast.parse(text)
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in (node for node in ast.walk(tree) if isinstance(node, kinds)):
        if docstring := ast.get_docstring(node):
            for fault in of_first_line(docstring.split("\n")[0]):
                yield f"{file}:{getattr(node, 'lineno', 1)}: {fault}"
    for line, words in written(text):
        for found in GONE.findall(words):
            if not (found.lower().startswith("chunk") and OF_HDF5.fullmatch(file)):
                yield f"{file}:{line}: {found!r}: see CONTRIBUTING.md"


def of_first_line(line: str) -> Iterator[str]:
    if line.split(maxsplit=1)[0] in FIRST:
        yield f"{line!r} begins with {line.split(maxsplit=1)[0]!r}"
    if not line.endswith("."):
        yield f"{line!r} does not end with a period"
    if len(line.split()) < 3:
        yield f"{line!r} has fewer than three words"


def written(text: str) -> Iterator[tuple[int, str]]:
    """Yield the comments, and the strings that are sentences, with their line numbers."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT or (token.type in STRINGS and " " in token.string.strip()):
            for number, line in enumerate(token.string.split("\n"), token.start[0]):
                yield number, re.sub(r"`[^`]*`|\{[^{}]*\}", "", line)


STRINGS = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


@pytest.mark.parametrize("file", product())
def test_the_language_of_a_file(file: str) -> None:
    found = [*faults(file, (ROOT / file).read_text())]
    assert bool(found) == (file in TO_DO), "\n".join(found) or f"{file} is done: take it from TO_DO"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('"""Return the mean of all groups."""', []),
        ('"""Of all groups."""', ["begins with 'Of'"]),
        ('"""Return the mean\nof all groups."""', ["does not end with a period"]),
        ('"""All groups."""', ["has fewer than three words"]),
        ("x = 1  # until they meet", ["'meet': see CONTRIBUTING.md"]),
        ('x = "after a Meeting of all"', ["'Meeting': see CONTRIBUTING.md"]),
        ('x = f"the chunks of {y}"', ["'chunks': see CONTRIBUTING.md"]),
        ('x = "chunks"', []),
        ('x = f"the shards of {told}"', []),
        ("x = 1  # `met` is a key", []),
    ],
)
def test_what_is_wrong_is_found(text: str, found: list[str]) -> None:
    faulty = [*faults("planted.py", text)]
    assert len(faulty) == len(found)
    assert all(words in fault for words, fault in zip(found, faulty, strict=True))


if __name__ == "__main__":
    for path in sys.argv[1:]:
        for fault in faults(path, Path(path).read_text()):
            print(fault)
