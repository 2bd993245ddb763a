"""Rows of the benchmarks that there are, by their own commands."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from harness.launching import BENCHMARKS
from papers.artifact import Place, Row


def benchmark(script: str, *words: str, data: bool = True) -> Callable[[Place], list[Row]]:
    """What `python benchmarks/SCRIPT WORDS` measures; `data`: it takes --data."""

    def measure(place: Place) -> list[Row]:
        more = [*(["--data", str(place.data)] if data else []), *(["--quick"] if place.quick else [])]
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "result.json"
            _call([sys.executable, str(BENCHMARKS / script), *words, *more, "--json", str(out)])
            return json.loads(out.read_text())["rows"]

    return measure


def _call(command: Sequence[str]) -> None:
    subprocess.run(command, stdin=subprocess.DEVNULL, check=True)
