"""What is worth a look: methods with their intervals, and ranks cut into groups."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcsgd.errors import UserError, near_miss
from hpcsgd.methods import METHODS

USUAL = ("bsp", "hierarchical", "allreduce_local_sgd", "sgp", "osgp", "d_psgd", "ad_psgd")
"""Beside the job file's own method."""
EVERY, STALENESS = 8, 1
"""Where a method wants one and the job file says nothing of it."""
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


@dataclass(frozen=True)
class Option:
    """A method as a job file has it."""

    table: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.table["name"]

    def __str__(self) -> str:
        plain = {k: v for k, v in self.table.items() if k != "name" and not isinstance(v, dict)}
        return " ".join([self.name, *(f"{key}={value}" for key, value in plain.items())])


def options(own: Mapping[str, Any], names: Sequence[str] | None, every: Sequence[int]) -> list[Option]:
    """The job file's own method and others, each with every interval to try. Raises `UserError` for
    a method that there is not."""
    wanted = names or list(dict.fromkeys((own["name"], *USUAL)))
    found: list[Option] = []
    for name in wanted:
        if name not in METHODS:
            raise UserError(f"--methods {name}: {near_miss(name, METHODS)}")
        table = dict(own) if name == own["name"] else {"name": name, **_arguments(name, own)}
        intervals = every if "sync_every" in table and every else [table.get("sync_every")]
        found += [Option(table if i is None else {**table, "sync_every": i}) for i in intervals]
    return found


def _arguments(name: str, own: Mapping[str, Any]) -> dict[str, Any]:
    """Those that a method must have."""
    known = {"sync_every": own.get("sync_every", EVERY), "overlap_steps": STALENESS}
    parameters = inspect.signature(METHODS[name]).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty]
    missing = [key for key in needed if key not in known and key != "steps_per_epoch"]
    if missing:
        raise UserError(
            f"--methods {name}: it needs {', '.join(missing)}: say it in [method] of the job file, with name "
            f"= {name!r}"
        )
    return {key: known[key] for key in needed if key in known}


def ranks_from(text: str) -> list[int]:
    """``64..4096``, doubling, or ``64,96,128``. Raises `UserError` for anything else."""
    try:
        if found := _RANGE.fullmatch(text):
            low, high = int(found[1]), int(found[2])
            numbers = [low << i for i in range(high.bit_length()) if 0 < low << i <= high]
        else:
            numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise UserError(f"--ranks {text}: expected ranks, as 64..4096 or 64,96,128, the smaller number first")
    return sorted(set(numbers))


def shapes(N: int, B: int, most_groups: int | None) -> Iterator[tuple[int, int]]:
    """P groups of K among N ranks, with at most so many groups, each of whose batches of B its ranks can
    share."""
    for P in range(1, min(N, most_groups or N) + 1):
        if N % P == 0 and B % (N // P) == 0:
            yield P, N // P
