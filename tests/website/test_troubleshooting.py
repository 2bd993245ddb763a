"""The messages that the troubleshooting page quotes are those of the code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from messages import OPEN, QUOTED, hears, said

ROOT = Path(__file__).parents[2]


def strings(root: Path) -> Iterator[str]:
    for path in root.rglob("*.py"):
        yield from filter(None, map(said, ast.walk(ast.parse(path.read_text()))))


def unheard(text: str, sayings: list[str]) -> list[str]:
    """Return the quotations that no message of the code matches."""
    quoted = [" ".join(x.split()) for x in QUOTED.findall(text)]
    return [x for x in quoted if not any(hears(saying, x) for saying in sayings)]


@pytest.mark.slow
def test_messages_are_quoted_as_they_are() -> None:
    text = (ROOT / "docs/troubleshooting.md").read_text()
    assert len(QUOTED.findall(text)) > 21
    assert unheard(text, list(strings(ROOT / "hpcsgd"))) == []


def test_a_wrong_quotation_is_found() -> None:
    text = "**`a … is\nhere`**, **`… is gone`**"
    assert unheard(text, [f"a {OPEN} is here", "it was gone"]) == ["… is gone"]
