"""Rows of the results in benchmarks/results, and functions that format them as pages do.

Each other module of this folder covers one page or two. It has a function per table or sentence, which
returns what the page must say: a table without its first two lines, or a part of a sentence.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks/results"
Row = dict[str, Any]


@cache
def result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def rows(name: str, **where: object) -> list[Row]:
    """Return the rows of a result that have these values."""
    return [row for row in result(name)["rows"] if row.items() >= where.items()]


def row(name: str, **where: object) -> Row:
    (only,) = rows(name, **where)
    return only


def goal(name: str, of: str) -> float:
    """Return the value of the only goal whose name contains `of`."""
    (only,) = (each["value"] for each in result(name)["goals"] if of in each["name"])
    return only


def table(lines: Iterable[Iterable[object]]) -> str:
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


def signed(number: float, digits: int) -> str:
    """Return the number as text, with a typographic minus sign."""
    return f"{number:.{digits}f}".replace("-", "−")


def over(ratio: float, digits: int = 2) -> str:
    """Return a ratio as text; that of the baseline itself has no decimals."""
    return "1" if ratio == 1 else f"{ratio:.{digits}f}"


def megabytes(nbytes: float) -> str:
    number = nbytes / 1e6
    return f"{number:,.{0 if number >= 1000 else 1 if number >= 10 else 2}f}"


def with_quartiles(spread: Row, digits: int = 3) -> str:
    median, low, high = (f"{spread[key]:.{digits}f}" for key in ("median", "low", "high"))
    return f"{median} ({low}–{high})"


def from_to(numbers: Iterable[float], digits: int = 0, between: str = " to ") -> str:
    """Return the smallest and the largest number as text."""
    ordered = sorted(numbers)
    return f"{ordered[0]:.{digits}f}{between}{ordered[-1]:.{digits}f}"
