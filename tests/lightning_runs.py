"""Trainings by Lightning on several ranks, which mpiexec or torchrun starts, and their results."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import programs
from pythons import python
from train.launches import unlaunched

PROGRAM = str(Path(__file__).parent / "lightning/cases.py")
Found = dict[str, list[Any]]
"""The result of each rank, by case."""


def lightning_python(words: Sequence[str]) -> list[str]:
    """Return the command of a Python that has imported Lightning already: the import takes seconds."""
    return python(*words, imported="hpcsgd.lightning")


def by_mpiexec(words: Sequence[str], n: int = 4) -> list[str]:
    return [programs.mpiexec(), "-n", str(n), *lightning_python(words)]


def by_torchrun(words: Sequence[str], n: int = 4) -> list[str]:
    agent = ["--standalone", "--nproc-per-node", str(n), "--no-python", *lightning_python(words)]
    return python("-m", "torch.distributed.run", *agent)


def run_once(folder: Path, *cases: str, by: Callable[[Sequence[str]], list[str]] = by_mpiexec) -> Found:
    """Run `cases` in one program and return the results of its ranks.

    The strategy saves either the averaged model or each group's own, so no warning is about `state_dict()`.
    """
    file = folder / "found"
    done = programs.run(by([PROGRAM, str(file), *cases]), env=unlaunched(), cwd=folder)
    assert "state_dict() of the model" not in done.stderr, done
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return {name: of_ranks for line in lines for name, of_ranks in line.items()}
