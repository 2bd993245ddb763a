"""MovieLens as distributed: one line per rating, with user, item, rating and time.

https://grouplens.org/datasets/movielens: `u.data` of ml-100k, `ratings.dat` of ml-1m and ml-10m, and
`ratings.csv` of ml-20m and later ones.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcsgd.data.formats.streams import existing, opened
from hpcsgd.data.interactions import Interactions
from hpcsgd.errors import UserError


class Table(NamedTuple):
    """The format of a file: the separator of fields in a line, and the header line, or None."""

    between: bytes
    head: bytes | None = None


TABLES = {
    "u.data": Table(b"\t"),
    "ratings.dat": Table(b"::"),
    "ratings.csv": Table(b",", b"userId,movieId,rating,timestamp"),
}
"""The formats of the distributed files, by their names."""


def read(source: Path | None) -> Interactions:
    """Return the ratings in `source`, a file named as in `TABLES` or the folder with one.

    Raises `UserError` if there is no such file. Raises `UserError` with the number of the line if a line is
    malformed or a user rates an item a second time.
    """
    path = _find(existing(source, f"the folder with {' or '.join(TABLES)}"))
    columns = array("q"), array("q"), array("q")
    for number, fields in _lines(path, TABLES[path.name]):
        try:
            user, item, rating, time = fields
            float(rating)
            for column, field in zip(columns, (user, item, time), strict=True):
                column.append(int(field))
        except (ValueError, OverflowError) as error:
            given = b" | ".join(fields).decode(errors="replace")[:80]
            raise UserError(
                f"{path}: line {number}: expected user, item, rating and time, not {given!r}"
            ) from error
    users, items, times = (np.frombuffer(column, np.int64) for column in columns)
    _require_once(users, items, path)
    return Interactions(str(path), users, items, times)


def _find(source: Path) -> Path:
    found = [path for path in (source, *(source / name for name in TABLES)) if path.is_file()]
    if len(found) != 1 or found[0].name not in TABLES:
        raise UserError(f"{source}: expected one of {', '.join(TABLES)}, or the folder that holds it")
    return found[0]


def _lines(path: Path, table: Table) -> Iterator[tuple[int, list[bytes]]]:
    """Yield the number and the fields of each line below the header.

    Raises `UserError` if the header is wrong or there is no such line.
    """
    with opened(path) as stream:
        number = 0
        for number, line in enumerate(stream.lines(), start=1):
            text = line.rstrip(b"\r")
            if number == 1 and table.head is not None:
                if text != table.head:
                    raise UserError(f"{path}: line 1: expected {table.head.decode()!r}")
                continue
            yield number, text.split(table.between)
        if number <= (table.head is not None):
            raise UserError(f"{path}: no ratings in it")


def _require_once(users: NDArray[np.int64], items: NDArray[np.int64], path: Path) -> None:
    order = np.lexsort([items, users])  # lexsort is stable: of equal pairs the earlier is first
    again = (np.diff(users[order]) == 0) & (np.diff(items[order]) == 0)
    if again.any():
        row = int(order[1:][again].min())
        line = row + 1 + (TABLES[path.name].head is not None)
        raise UserError(f"{path}: line {line}: user {users[row]} has rated item {items[row]} before")
