"""The table of all results in benchmarks/results/, with the command that made each and the date."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from repository import ROOT

RESULTS = "benchmarks/results"
HEAD = """
## Where all figures come from

Every figure of these pages is in a file of the repository, with the machine, the versions and the command
that made it. Goals were set before measuring; `benchmarks/README.md` says which were missed.

| result | made by | begun | goals met |
|---|---|---|---|
"""


def table() -> str:
    """Return the table that ends docs/performance.md; its links are relative to the repository's top."""
    return HEAD + "".join(_row(path) for path in sorted((ROOT / RESULTS).rglob("*.json")))


def _row(path: Path) -> str:
    result: Mapping[str, Any] = json.loads(path.read_text())
    goals = [goal["met"] for goal in result.get("goals", []) if goal.get("met") is not None]
    met = f"{sum(goals)} of {len(goals)}" if goals else ""
    command = shlex.join(_shown(result["command"]))
    return (
        f"| [{path.stem}]({path.relative_to(ROOT)}) | `{command}` | {result.get('date', '')[:10]} | {met} |\n"
    )


def _shown(command: list[str]) -> list[str]:
    """Return the command without the options that name the files that it writes."""
    kept = command[:2]
    for word, before in zip(command[2:], command[1:], strict=False):
        if word not in ("--json", "--plot") and before not in ("--json", "--plot"):
            kept.append(word)
    return kept
