"""Comparison of variants of one training: their results, and the steps, seconds and bytes they needed.

Seconds are those of training steps, without evaluations and checkpoints. Bytes are those that rank 0 sent.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcsgd.errors import UserError
from hpcsgd.files.atomic import replacing
from hpcsgd.files.reading import read_json
from hpcsgd.report.figures import FIGURES, Figure, found_in
from hpcsgd.report.metrics import Record
from hpcsgd.report.summary import byte_text, of_kind, second_text, summary

Row = dict[str, Any]
LOSS = Figure("loss", min, ".4g")
"""The figure that is compared if the records have no figure of merit."""


@dataclass(frozen=True)
class Entry:
    """One variant of the training, which runs in P groups of K ranks, and its records so far."""

    label: str
    P: int
    K: int
    complete: bool
    records: Sequence[Record]


@dataclass(frozen=True)
class Point:
    """An evaluation: the steps, seconds and bytes of the run until then, and the figure of merit."""

    steps: int
    seconds: float
    bytes: float
    value: float


@dataclass(frozen=True)
class Comparison:
    """The comparison of all variants, in order. Ratios are relative to the first variant."""

    entries: Sequence[Entry]
    target: float | None = None

    @property
    def metric(self) -> str:
        """The key, in records, of the number to compare: the first figure of merit, or else the loss."""
        found = found_in(record for entry in self.entries for record in of_kind(entry.records, "eval"))
        return found[0] if found else "loss"

    @property
    def figure(self) -> Figure:
        return FIGURES.get(self.metric, LOSS)

    def course(self, entry: Entry) -> list[Point]:
        """Return a `Point` for each evaluation of `entry` on the test data, in order."""
        key, readings = self.metric, iter(of_kind(entry.records, "step"))
        points: list[Point] = []
        seconds = sent = 0.0
        reading = next(readings, None)
        for record in of_kind(entry.records, "eval"):
            while reading is not None and reading["step"] <= record["step"]:
                seconds += reading["samples"] / reading["samples_per_s"]
                sent += sum(reading["phase_bytes"].values())
                reading = next(readings, None)
            points.append(Point(record["step"], seconds, sent, record[key]))
        return points

    def reached(self, entry: Entry) -> Point | None:
        """Return the first evaluation of `entry` with a value as good as the target or better, or None."""
        if self.target is None:
            return None
        best, target = self.figure.best, self.target
        return next((p for p in self.course(entry) if best(p.value, target) == p.value), None)

    def rows(self) -> list[Row]:
        """Return the numbers of each variant, by name. Unknown numbers are None."""
        rows = [self._row(entry) for entry in self.entries]
        spent = [name for name in rows[0] if name.startswith(("seconds", "bytes"))]
        return [row | {f"{name}_ratio": _ratio(row[name], rows[0][name]) for name in spent} for row in rows]

    def _row(self, entry: Entry) -> Row:
        numbers, key = summary(entry.records), self.metric
        row = {
            "label": entry.label,
            "P": entry.P,
            "K": entry.K,
            "complete": entry.complete,
            **{name: numbers[name] for name in ("steps", "samples", "loss")},
            key: numbers.get(key),
            f"best_{key}": numbers.get(f"best_{key}"),
            "seconds": numbers["seconds"],
            "bytes": sum(numbers["bytes_per_phase"].values()),
        }
        if self.target is not None:
            there = self.reached(entry)
            for name in ("steps", "seconds", "bytes"):
                row[f"{name}_to_target"] = None if there is None else getattr(there, name)
        return row


def _ratio(value: float | None, first: float | None) -> float | None:
    return None if value is None or not first else value / first


def read_comparison(file: Path) -> dict[str, Any]:
    """Return the content of the ``compare.json`` at `file`. Raises `UserError` for any other file."""
    found = read_json(file)
    try:
        for row in found["variants"]:
            if not isinstance(row["label"], str):
                raise TypeError(f"label = {row['label']!r}")
    except (KeyError, TypeError) as error:
        raise UserError(f"{file}: not the compare.json of a comparison: {error}") from error
    return found


def write_comparison(folder: Path, comparison: Comparison, **more: Any) -> None:
    """Write ``compare.json`` (with the fields `more` in addition) and ``compare.csv`` to `folder`."""
    rows = comparison.rows()
    whole = {**more, "metric": comparison.metric, "target": comparison.target, "variants": rows}
    with replacing(folder / "compare.json") as part:
        part.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    with replacing(folder / "compare.csv") as part, part.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)


def comparison_text(comparison: Comparison) -> str:
    """Return the comparison as a table to print, with a line per variant."""
    figure, key = comparison.figure, comparison.metric
    head = ["", "P × K", "steps", "samples", figure.name, "best", *_SPENT]
    if comparison.target is not None:
        head += [f"steps to {comparison.target:g}", *_SPENT]
    lines = [head]
    for row in comparison.rows():
        line = [row["label"] if row["complete"] else f"{row['label']} (unfinished)"]
        line += [f"{row['P']} × {row['K']}", f"{row['steps']:,}", f"{row['samples']:,}"]
        line += [_text(row[name], figure.text) for name in (key, f"best_{key}")]
        line += _spent(row, "")
        if comparison.target is not None:
            line += [_text(row["steps_to_target"], "{:,}".format), *_spent(row, "_to_target")]
        lines.append(line)
    return _aligned(lines)


_SPENT = ("time", "ratio", "sent", "ratio")


def _spent(row: Mapping[str, Any], suffix: str) -> list[str]:
    found = []
    for name, text in (("seconds", second_text), ("bytes", byte_text)):
        found += [_text(row[name + suffix], text), _text(row[f"{name}{suffix}_ratio"], "{:.2f}".format)]
    return found


def _text(value: Any, text: Any) -> str:
    return "–" if value is None else text(value)


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    """Return rows of cells as lines of text, with the first column aligned left and the others right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines
    )
