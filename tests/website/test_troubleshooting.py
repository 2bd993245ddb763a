"""What the page of troubles quotes is what the code says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
QUOTED = re.compile(r"\*\*`(.+?)`\*\*", re.DOTALL)
OPEN = "…"


def said(node: ast.AST) -> str | None:
    """A string as a reader sees it, with … for what is filled in."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(x.value) if isinstance(x, ast.Constant) else OPEN for x in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def strings(root: Path) -> Iterator[str]:
    for path in root.rglob("*.py"):
        yield from filter(None, map(said, ast.walk(ast.parse(path.read_text()))))


def unheard(text: str, sayings: list[str]) -> list[str]:
    """Quotations that nobody says."""
    quoted = [" ".join(x.split()) for x in QUOTED.findall(text)]
    return [x for x in quoted if not any(x.strip(f"{OPEN} :") in saying for saying in sayings)]


def test_messages_are_quoted_as_they_are() -> None:
    text = (ROOT / "docs/troubleshooting.md").read_text()
    assert len(QUOTED.findall(text)) > 40
    assert unheard(text, list(strings(ROOT / "hpcsgd"))) == []


def test_a_wrong_quotation_is_found() -> None:
    text = "**`a … is\nhere`**, **`… is gone`**"
    assert unheard(text, [f"a {OPEN} is here", "it was gone"]) == ["… is gone"]
