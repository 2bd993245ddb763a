"""Where a page has a table, or words with figures."""

from __future__ import annotations

import re
from collections.abc import Iterator


def tables(page: str) -> list[str]:
    """Return the tables without their first two lines, with one blank in each empty cell."""
    parts = [part.strip() for part in re.split(r"\n\s*\n", page)]
    return [re.sub(" +", " ", part.split("\n", 2)[2]) for part in parts if part.startswith("| ")]


def says(page: str, what: str) -> bool:
    """Return whether a page has this table, or these words without further digits around them."""
    if what.startswith("|"):
        return re.sub(" +", " ", what) in tables(page)
    return any(places(page, what))


def places(page: str, what: str) -> Iterator[range]:
    """Yield the characters of a page that are these words, without further digits around them."""
    words = re.escape(" ".join(what.split())).replace(r"\ ", r"\s+")
    for found in re.finditer(rf"(?<![\d.,]){words}(?![.,]?\d)", page):
        yield range(*found.span())
