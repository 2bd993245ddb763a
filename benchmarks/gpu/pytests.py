"""Tests of the repository, run by a section."""

from __future__ import annotations

import functools
import itertools
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from harness import Goal, mpiexec, programs
from harness.launching import BENCHMARKS

ROOT = BENCHMARKS.parent
PLUGINS = ("_hypothesis_pytestplugin", "pytest_mpi", "pytest_timeout", "xdist.plugin")
"""Plugins that the tests use. Others that a machine has could warn, and a warning is an error here."""
FIRST = 300
"""Number of characters kept of the message of a failed test."""


@dataclass(frozen=True)
class Tested:
    """The results of the tests that `words` selected."""

    words: tuple[str, ...]
    ranks: int
    passed: int
    skipped: dict[str, str]
    failed: dict[str, str]
    ended: str
    """Why pytest itself did not finish, or "" if it did."""

    def row(self) -> dict[str, Any]:
        return {**self.__dict__, "words": " ".join(self.words)}

    def goals(self, about: str) -> list[Goal]:
        """Return the goal that no test fails, is skipped or is missing."""
        bad = len(self.failed) + len(self.skipped) + bool(self.ended) + (self.passed == 0)
        return [Goal(f"{about}: tests that fail or are skipped ({self.passed} pass)", bad, 0)]

    def print(self) -> None:
        for name, why in {**self.failed, **self.skipped}.items():
            print(f"note: {name}: {why}")
        if self.ended:
            print(f"note: {self.ended.splitlines()[0]}")


def tested(words: Sequence[str], timeout: float, ranks: int) -> Tested:
    """Run `pytest` with these words on `ranks` ranks of MPI; its output goes to the log."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = [] if ranks == 1 else [mpiexec(), "-n", str(ranks)]
        number = "$PMI_RANK" if ranks > 1 else "0"  # pytest expands the variable
        command = [
            *launcher, sys.executable, "-m", "pytest", "-q", "-rs", "--color=no", "--capture=sys",
            *itertools.chain(*(("-p", plugin) for plugin in PLUGINS)),
            "-p", "no:cacheprovider", f"--junitxml={folder}/{number}.xml",
            *(["--with-mpi"] if ranks > 1 else []), *words,
        ]  # fmt: skip
        environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        run = functools.partial(programs.run, cwd=ROOT, env=environment, capture=False, check=False)
        try:
            code = run(command, timeout=timeout).returncode
            ended = "" if code in (0, 1) else f"pytest ended with code {code}"
        except programs.Failed as failed:
            ended = str(failed)
        file = Path(folder) / "0.xml"
        passed, skipped, failures = _read(file) if file.exists() else (0, {}, {})
    return Tested(tuple(words), ranks, passed, skipped, failures, ended)


def _read(file: Path) -> tuple[int, dict[str, str], dict[str, str]]:
    passed, skipped, failed = 0, {}, {}
    for case in ElementTree.parse(file).iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}"
        wrong = [child for child in case if child.tag in ("failure", "error")]
        if wrong:
            failed[name] = (wrong[0].get("message") or "")[:FIRST]
        elif (left_out := case.find("skipped")) is not None:
            skipped[name] = left_out.get("message") or ""
        else:
            passed += 1
    return passed, skipped, failed
