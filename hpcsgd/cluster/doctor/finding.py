"""A finding: one line of the report of `hpcsgd doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    """The severity of a finding. With a warning training works, but may be slower than necessary."""

    OK = "OK"
    WARNING = "WARNING"
    ERROR = "ERROR"


@dataclass(frozen=True)
class Finding:
    """The result of a check. For warnings and errors the text also says what to do."""

    level: Level
    text: str

    def __str__(self) -> str:
        return f"{self.level.value:<8} {self.text}"


def ok(text: str) -> Finding:
    return Finding(Level.OK, text)


def warning(text: str) -> Finding:
    return Finding(Level.WARNING, text)


def error(text: str) -> Finding:
    return Finding(Level.ERROR, text)


def numbers(values: list[int]) -> str:
    """Return the numbers as text in ascending order, with ranges, such as ``0-3,8``."""
    runs: list[list[int]] = []
    for value in sorted(set(values)):
        if runs and value == runs[-1][-1] + 1:
            runs[-1][-1:] = [runs[-1][-1], value] if len(runs[-1]) == 1 else [value]
        else:
            runs.append([value])
    return ",".join("-".join(map(str, run)) for run in runs)
