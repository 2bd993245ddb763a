"""The candidates that a plan compares: methods with intervals, and numbers of groups and ranks."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcsgd.errors import UserError, near_miss
from hpcsgd.methods import METHODS

USUAL = ("bsp", "hierarchical", "allreduce_local_sgd", "sgp", "osgp", "d_psgd", "ad_psgd")
"""Methods to try in addition to the job file's own."""
SYNC_EVERY, STALENESS = 8, 1
"""Values of `sync_every` and `overlap_steps` if a method needs them and the job file has none."""
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


@dataclass(frozen=True)
class Option:
    """A candidate method with its arguments, as a [method] table of a job file."""

    table: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.table["name"]

    def __str__(self) -> str:
        plain = {k: v for k, v in self.table.items() if k != "name" and not isinstance(v, dict)}
        return " ".join([self.name, *(f"{key}={value}" for key, value in plain.items())])


def options(own: Mapping[str, Any], names: Sequence[str] | None, sync_every: Sequence[int]) -> list[Option]:
    """Return the job file's method and others (or those in `names`), each with every value of `sync_every`.

    Raises `UserError` if a method does not exist.
    """
    wanted = names or list(dict.fromkeys((own["name"], *USUAL)))
    found: list[Option] = []
    for name in wanted:
        if name not in METHODS:
            raise UserError(f"--methods {name}: {near_miss(name, METHODS)}")
        table = dict(own) if name == own["name"] else {"name": name, **_arguments(name, own)}
        tried = sync_every if "sync_every" in table and sync_every else [table.get("sync_every")]
        found += [Option(table if i is None else {**table, "sync_every": i}) for i in tried]
    return found


def _arguments(name: str, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the required arguments of method `name`, from the job file's method or by default."""
    known = {"sync_every": own.get("sync_every", SYNC_EVERY), "overlap_steps": STALENESS}
    parameters = inspect.signature(METHODS[name]).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty]
    missing = [key for key in needed if key not in (*known, "steps_per_epoch", "total_steps")]
    if missing:
        raise UserError(
            f"--methods {name}: it needs {', '.join(missing)}: say it in [method] of the job file, with name "
            f"= {name!r}"
        )
    return {key: known[key] for key in needed if key in known}


def ranks_from(text: str) -> list[int]:
    """Return the numbers of ranks in a text such as ``64..4096`` (doubling) or ``64,96,128``.

    Raises `UserError` for another text.
    """
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
    """Yield all (P, K) with P·K = N, at most `most_groups` groups, and K a divisor of the batch size B."""
    for K in range(min(N, B), 0, -1):
        if N % K == 0 and B % K == 0 and (most_groups or N) >= N // K:
            yield N // K, K
