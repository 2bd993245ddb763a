"""Print a table on the screen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def print_table(rows: Iterable[Sequence[object]], head: Sequence[str]) -> None:
    cells = [list(head), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
