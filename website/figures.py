"""The table of all results in benchmarks/results/: what made each, where and when."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = "benchmarks/results"
HEAD = """
## Where all figures come from

Every figure of these pages is in a file of the repository, with the machine, the versions and the command
that made it. Goals are those set before measuring; what missed them is told where the figures are shown.

| result | made by | begun | goals met |
|---|---|---|---|
"""


def table(root: Path) -> str:
    return HEAD + "".join(_row(root, path) for path in sorted((root / RESULTS).rglob("*.json")))


def _row(root: Path, path: Path) -> str:
    result: Mapping[str, Any] = json.loads(path.read_text())
    goals = [goal["met"] for goal in result.get("goals", []) if goal.get("met") is not None]
    met = f"{sum(goals)} of {len(goals)}" if goals else ""
    command = shlex.join(_shown(result["command"]))
    return (
        f"| [{path.stem}]({path.relative_to(root)}) | `{command}` | {result.get('date', '')[:10]} | {met} |\n"
    )


def _shown(command: list[str]) -> list[str]:
    """Without the names of what it writes, which are beside it."""
    kept = command[:2]
    for word, before in zip(command[2:], command[1:], strict=False):
        if word not in ("--json", "--plot") and before not in ("--json", "--plot"):
            kept.append(word)
    return kept
