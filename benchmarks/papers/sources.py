"""Rows from the other benchmarks, which are run by their own commands."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from harness import programs
from harness.launching import BENCHMARKS
from papers.artifact import Place, Row

TIMEOUT = 86_400.0
"""Seconds after which a benchmark is stopped, because it must be hanging."""


def benchmark(script: str, *words: str, data: bool = True) -> Callable[[Place], list[Row]]:
    """Return a function that runs `python benchmarks/SCRIPT WORDS` and returns its rows.

    `data`: True if the benchmark has the option --data.
    """

    def measure(place: Place) -> list[Row]:
        more = [*(["--data", str(place.data)] if data else []), *(["--quick"] if place.quick else [])]
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "result.json"
            command = [sys.executable, BENCHMARKS / script, *words, *more, "--json", out]
            programs.run(command, timeout=TIMEOUT, capture=False)
            return json.loads(out.read_text())["rows"]

    return measure
