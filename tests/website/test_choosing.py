"""Every figure in bold that comes from another page is on a page that its row or paragraph links to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = {"README.md": 13, "docs/choosing.md": 50}
"""The pages, each with the least number of figures in bold."""
FIGURE = re.compile(r"\*\*([^*\n]*\d[^*\n]*)\*\*")
LINK = re.compile(r"\]\(([\w./]+\.md)")


def passages(text: str) -> list[str]:
    """Return the paragraphs, and each row of a table by itself."""
    found = [part for part in text.split("\n\n") if not part.startswith("|")]
    return found + [row for row in text.splitlines() if row.startswith("|")]


def stands_in(figure: str, text: str) -> bool:
    return re.search(rf"(?<![\d.]){re.escape(figure)}(?!\d)", text) is not None


def unfounded(text: str, folder: Path) -> list[str]:
    """Return the figures that are on none of the pages linked in the same passage."""
    lost = []
    for passage in passages(text):
        linked = " ".join((folder / link).read_text() for link in LINK.findall(passage))
        lost += [
            x for x in FIGURE.findall(passage) if not re.search(rf"(?<![\d.]){re.escape(x)}(?!\d)", linked)
        ]
    return lost


@pytest.mark.parametrize("page", PAGES)
def test_figures_are_those_of_their_pages(page: str) -> None:
    text = (ROOT / page).read_text()
    assert len(FIGURE.findall(text)) >= PAGES[page]
    assert unfounded(text, (ROOT / page).parent) == []


def test_an_unfounded_figure_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("12.5 and 3")
    text = "**12.5** [a](a.md)\n\n| **3** | [a](a.md) |\n| **2.5** | [a](a.md) |\n\n**3**"
    assert sorted(unfounded(text, tmp_path)) == ["2.5", "3"]
