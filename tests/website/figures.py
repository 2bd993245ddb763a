"""Figures in the sentences of a page: numbers with a unit that can be measured, and numbers with decimals."""

from __future__ import annotations

import re
from collections.abc import Iterator

UNITS = (
    "%", "times", "points?", "[mb]illion", "[kMGT]B", "[nµm]?s", "seconds?", "minutes?", "hours?", "days?",
)  # fmt: skip
WITH_A_UNIT = rf"\d[\d.,]*(?:\s(?:to|or|and)\s\d[\d.,]*)?\s?(?:{'|'.join(UNITS)})(?!\w)"
FIGURE = re.compile(rf"(?<![\w.,]){WITH_A_UNIT}|(?<![\w.,])\d[\d,]*\.\d+")
LEFT_OUT = re.compile(
    r"""
    ^```.*?^```$            # blocks of code
    | <!--.*?-->
    | ^(?:\||[ ]{4}).*?$      # tables, which test_measured.py checks; indented code
    | `[^`\n]*`
    | \]\([^)]*\)           # addresses of links
    | \d{4}\.\d{4,5}          # arXiv
    | (?:MPICH|MPI|[Tt]orch|Linux|Python|Safari|Slurm|trl)\s+[\d.]+
    """,
    re.MULTILINE | re.DOTALL | re.VERBOSE,
)


def figures(page: str) -> Iterator[range]:
    """Yield the characters of each figure of a page."""
    sentences = LEFT_OUT.sub(lambda found: re.sub(r"[^\n]", " ", found.group()), page)
    for found in FIGURE.finditer(sentences):
        yield range(*found.span())


def unfounded(page: str, founded: list[range]) -> list[str]:
    """Return the figures that are in none of the passages `founded`, each with some words around it."""
    return [
        " ".join(page[max(0, figure.start - 50) : figure.stop + 30].split())
        for figure in figures(page)
        if not any(figure.start >= passage.start and figure.stop <= passage.stop for passage in founded)
    ]
