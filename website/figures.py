"""The table of all results in benchmarks/results/, with the command that made each and the date."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from repository import ROOT

RESULTS = "benchmarks/results"
OWN_FILES = ("--json", "--keep", "--out", "--plot", "--trials")
"""The options for results and pictures: files that the command writes, or that it wrote earlier."""
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
    met = f"{sum(goals)}\u00a0of\u00a0{len(goals)}" if goals else ""
    date = result.get("date", "")[:10].replace("-", "\u2011")  # a hyphen that does not break the line
    command = shlex.join(_shown(result["command"]))
    name = path.relative_to(ROOT / RESULTS).with_suffix("")
    return f"| [{name}]({path.relative_to(ROOT)}) | `{command}` | {date} | {met} |\n"


def _shown(command: list[str]) -> list[str]:
    """Return the command without options that name its own files, and without the folders of its machine."""
    kept: list[str] = []
    option = ""
    for word in command:
        option = word if word.startswith("--") else option
        if option not in OWN_FILES:
            kept.append(Path(word).name if word.startswith("/") else word)
    return kept
