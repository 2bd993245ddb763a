"""Trials of mutants: find the tests that run a changed line, and check whether one of them fails."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections import defaultdict
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path

import coverage

import programs
from mutants.sites import Mutant
from tier import ENVIRONMENT, TIERS, parts

PYTEST = [sys.executable, "-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider"]
NO_TESTS = 5  # pytest's exit code
PATIENCE = 1800.0  # the time limit of a run of the tests, in seconds


@dataclass(frozen=True)
class Covered:
    """The ids of the tests of a tier that run each line, and their seconds."""

    by_line: Mapping[tuple[str, int], frozenset[str]]
    by_file: Mapping[str, frozenset[str]]
    seconds: Mapping[str, float]

    def of(self, mutant: Mutant) -> list[list[str]]:
        """Return the tests to try, in stages: those of the same package, then the others.

        No test is known to run a line that only runs at import or in other processes. Then the stages have
        all tests of the same package, which may start such processes, and all tests that run any line of the
        file.
        """
        line = self.by_line.get((mutant.file, mutant.line), frozenset())
        near = f"tests/{Path(mutant.package).name}/"
        found = line or self.by_file.get(mutant.file, frozenset())
        own = {test for test in (line or self.seconds) if test.startswith(near)}
        stages = [sorted(own, key=self._cost), sorted(found - own, key=self._cost)]
        return [stage for stage in stages if stage]

    def write(self, path: Path) -> None:
        """Write this to a file."""
        lines = [[file, line, sorted(tests)] for (file, line), tests in self.by_line.items()]
        path.write_text(json.dumps({"lines": lines, "seconds": dict(self.seconds)}))

    @classmethod
    def read(cls, path: Path) -> Covered:
        """Return what `write` has written to a file."""
        found = json.loads(path.read_text())
        return cls.of_lines(
            {(file, line): set(tests) for file, line, tests in found["lines"]}, found["seconds"]
        )

    @classmethod
    def of_lines(cls, by_line: Mapping[tuple[str, int], Set[str]], seconds: Mapping[str, float]) -> Covered:
        by_file: dict[str, set[str]] = defaultdict(set)
        for (file, _), tests in by_line.items():
            by_file[file] |= tests
        return cls(
            {place: frozenset(tests) for place, tests in by_line.items()},
            {file: frozenset(tests) for file, tests in by_file.items()},
            seconds,
        )

    def _cost(self, test: str) -> float:
        return self.seconds.get(test, 0.0)


def commands_on_ranks(tier: str) -> list[list[str]]:
    """Return the commands of a tier whose ranks a launcher starts."""
    return [list(command) for _, command in parts(replace(TIERS[tier], workers=""), programs.mpiexec())]


class Copy:
    """A copy of the checkout in which the product is changed."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder = folder
        listed = programs.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=root
        )
        built = [path.relative_to(root) for path in (root / "hpcsgd").rglob("*.so")]
        for name in [*filter(None, listed.stdout.split("\0")), *built]:
            if not (root / name).exists():
                continue
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name, follow_symlinks=False)
        (folder / "build").symlink_to(root / "build")  # libraries that tests compile, named by a hash

    def covered(self, tier: str) -> Covered:
        """Run the tier once, and record which test runs which line."""
        found = self.folder / "covered"
        noting = ["--cov=hpcsgd", "--cov-context=test", "--cov-report=", "-p", "mutants.noting"]
        parallel = ["--numprocesses=auto", "--dist=loadfile", "--no-loadscope-reorder"]
        command = [*PYTEST, *TIERS[tier].options, *noting, *parallel]
        done = self._run(*command, NOTED=str(found))
        if done.returncode != 0 and not self._fails_only_traced(done):
            raise SystemExit(f"{done.stdout}{done.stderr}\nTests fail without any mutant.")
        data = coverage.CoverageData(str(self.folder / ".coverage"))
        data.read()
        by_line: dict[tuple[str, int], set[str]] = defaultdict(set)
        for path in data.measured_files():
            file = Path(path).relative_to(self.folder).as_posix()
            for line, contexts in data.contexts_by_lineno(path).items():
                tests = {re.sub(r"\|(setup|run|teardown)$", "", context) for context in contexts if context}
                by_line[file, line] |= tests
        return Covered.of_lines(by_line, json.loads(found.read_text()))

    def _fails_only_traced(self, done: programs.Done) -> bool:
        """Return whether the tests that have failed in `done` pass where their lines are not recorded.

        Python 3.11 cannot trace two threads that start at the same time: one of them ends with "Cannot
        install a trace function while another trace function is being installed".
        """
        failed = set(re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE))
        return bool(failed) and self.failure(sorted(failed)) is None

    def killer(self, mutant: Mutant, covered: Covered, tier: str) -> str | None:
        """Return the first test that fails with the mutant, or None if all pass."""
        path = self.folder / mutant.file
        text = path.read_text()
        path.write_text(mutant.applied(text))
        try:
            for tests in covered.of(mutant):
                if (failed := self.failure(tests)) is not None:
                    return failed
            if (mutant.file, mutant.line) not in covered.by_line:
                return self.failure_on_ranks(tier)
        finally:
            path.write_text(text)
        return None

    def failure(self, tests: list[str]) -> str | None:
        """Return the first of `tests` that fails, or None."""
        chosen = self.folder / "chosen"
        chosen.write_text(json.dumps(tests))
        files = sorted({test.split("::")[0] for test in tests})
        return self._failure(*PYTEST, "-x", "-p", "mutants.noting", *files, CHOSEN=str(chosen))

    def failure_on_ranks(self, tier: str) -> str | None:
        """Return the first test that fails on MPI ranks, or None."""
        for command in commands_on_ranks(tier):
            if (failed := self._failure(*command, "-x")) is not None:
                return failed
        return None

    def _failure(self, *command: str, **environment: str) -> str | None:
        """Return the first test that fails in a command, or None."""
        try:
            done = self._run(*command, **environment)
        except programs.TimedOut:
            return "the time limit"
        assert done.returncode != NO_TESTS, f"{command} chooses no test"
        if done.returncode == 0:
            return None
        printed = (done.stdout + done.stderr).strip()
        named = re.search(r"^(?:FAILED|ERROR) (\S+)", printed, re.MULTILINE)
        return named[1] if named else printed.splitlines()[-1]

    def _run(self, *command: str, **environment: str) -> programs.Done:
        paths = [self.folder, self.folder / "tests"]
        return programs.run(
            command,
            cwd=self.folder,
            env={
                **os.environ,
                **ENVIRONMENT,
                "PYTHONPATH": os.pathsep.join(map(str, paths)),
                "PYTHONDONTWRITEBYTECODE": "1",  # otherwise Python may miss a change within a second
                **environment,
            },
            timeout=PATIENCE,
            check=False,
        )
