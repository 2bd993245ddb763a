"""The metrics of one run, read in one pass with little memory.

The results are courses (a metric over the steps of the run) and totals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hpcsgd.errors import UserError
from hpcsgd.report.metrics import STEP_TABLES, Record
from hpcsgd.report.page.thinning import ThinnedCourse
from hpcsgd.report.totals import Totals, mean_of

Key = tuple[str, str]
"""The kind of a record, and the name of a field."""
Row = tuple[float, float, float, float]
SPENT = ("step", "samples", "seconds", "bytes")
"""The quantities against which a course may be drawn. A `Row` has their values in this order."""
PLACE = frozenset({"kind", "step", "epoch"})
TOLD_OTHERWISE = PLACE | {"progress", "samples", *STEP_TABLES, "counts"}
"""Fields of step records that the page shows in other ways than as courses."""
COMPUTED = "computed"
"""The kind, in a `Key`, of courses that are computed from records but are no field of a record."""
COURSES = 1000
"""Maximum number of courses of a run. Records may have new fields in every line."""


class Ruler:
    """The steps, samples, seconds and bytes of a run up to each of its step records.

    If there are many records, only every second, fourth, … row is kept.
    """

    most = 1000

    def __init__(self) -> None:
        self._rows: list[Row] = [(0, 0, 0.0, 0.0)]
        self._last = self._rows[0]
        self._every = 1
        self._seen = 0

    def add(self, row: Row) -> None:
        self._seen += 1
        self._last = row
        if self._seen % self._every == 0:
            self._rows.append(row)
        if len(self._rows) > self.most:
            self._rows = self._rows[::2]
            self._every *= 2

    def rows(self, most: int) -> list[Row]:
        """Return about `most` rows, from the beginning to the last record."""
        rows = self._rows[:: -(-len(self._rows) // max(most, 2))]
        return rows if rows[-1] == self._last else [*rows, self._last]


class PhaseCourse:
    """The seconds of each phase in stretches of steps. If there are many, neighbouring ones are joined."""

    most = 400

    def __init__(self) -> None:
        self._stretches: list[tuple[int, Counter[str]]] = []  # the last step and the seconds of each stretch
        self._width = 1
        self._room = 0  # records that the last stretch may still take

    def add(self, step: int, seconds: dict[str, float]) -> None:
        if self._room:
            self._stretches[-1][1].update(seconds)
            self._stretches[-1] = step, self._stretches[-1][1]
            self._room -= 1
            return
        if len(self._stretches) == self.most:
            pairs = zip(self._stretches[::2], self._stretches[1::2], strict=True)
            self._stretches = [(end, first + then) for (_, first), (end, then) in pairs]
            self._width *= 2
        self._stretches.append((step, Counter(seconds)))
        self._room = self._width - 1

    def stretches(self) -> list[tuple[int, int, Counter[str]]]:
        """Return the last step, the number of steps and the seconds by phase of each stretch."""
        ends = [0, *(end for end, _ in self._stretches)]
        return [(end, max(end - begin, 1), s) for begin, (end, s) in zip(ends, self._stretches, strict=False)]


class Reading:
    """The totals of all records added so far, and the courses of their metrics over the steps."""

    def __init__(self) -> None:
        self.totals = Totals()
        self.courses: dict[Key, ThinnedCourse] = {}
        self.ruler = Ruler()
        self.phases = PhaseCourse()
        self.records: Counter[str] = Counter()
        """Number of records by kind."""
        self.words: dict[Key, Counter[str]] = {}
        """Values that are not numbers, by field: the first five, and how often each occurred."""
        self.left_out = 0
        """Number of values that were left out because there were already `COURSES` courses."""

    def add(self, record: Record) -> None:
        kind, step = record["kind"], record["step"]
        self.records[kind] += 1
        self.totals.add(record)
        if kind == "step":
            self._read(record)
        elif kind == "sync":
            self._alone(step)
        known = TOLD_OTHERWISE if kind == "step" else PLACE
        for name, value in record.items():
            if name not in known:
                self._take(kind, name, step, value)

    def _read(self, record: Record) -> None:
        totals, step = self.totals, record["step"]
        self.ruler.add((step, totals.samples, totals.seconds, totals.bytes))
        self.phases.add(step, record["phase_seconds"])
        self._alone(step)
        for name, counts in record.get("counts", {}).items():
            mean = mean_of({int(value): n for value, n in counts.items()})
            if mean is not None:
                self._course(COMPUTED, f"mean {name}").add(step, mean)

    def _alone(self, step: int) -> None:
        """Add the fraction of local steps so far (LSSR) to its course."""
        if (part := self.totals.lssr) is not None:
            self._course(COMPUTED, "lssr").add(step, max(part, 0.0))

    def _take(self, kind: str, name: str, step: int, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                self._take(kind, f"{name}.{key}", step, inner)
        elif isinstance(value, (int, float)):
            self._course(kind, name).add(step, float(value))
        elif value is not None and len(self.words) < COURSES:
            words = self.words.setdefault((kind, name), Counter())
            text = str(value)[:200]
            if text in words or len(words) < 5:
                words[text] += 1

    def _course(self, kind: str, name: str) -> ThinnedCourse:
        found = self.courses.get((kind, name))
        if found is None:
            found = ThinnedCourse()
            if len(self.courses) < COURSES:
                self.courses[kind, name] = found
            else:
                self.left_out += 1
        return found


def read(path: Path, records: Iterable[Record]) -> Reading:
    """Return the totals of the metrics in `records`, and the course of each metric over the steps.

    A course is a series of values, thinned to a few points. `records` are the lines of the file `path`. For a
    damaged record, raises `UserError`, which names the file and the line.
    """
    reading = Reading()
    for number, record in enumerate(records, start=1):
        try:
            reading.add(record)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            lacking = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise UserError(f"{path}:{number}: not a metrics record: {lacking}") from error
    return reading
