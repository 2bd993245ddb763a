"""Check that every rank can read the dataset file."""

from __future__ import annotations

from pathlib import Path

from hpcsgd.cluster.doctor.finding import Finding, error, numbers, ok
from hpcsgd.comm import Communicator
from hpcsgd.data import open_split
from hpcsgd.errors import UserError


def open_everywhere(world: Communicator, path: Path) -> Finding:
    """Check that each rank finds the dataset file `path` and reads its first training sample; collective."""
    answers = world.gather_objects(_read(path))
    failed = [rank for rank, (_, problem) in enumerate(answers) if problem]
    if failed:
        return error(f"dataset file: on rank {numbers(failed)}: {answers[failed[0]][1]}")
    return ok(f"dataset file: {path}, {answers[0][0]} training samples, readable on every rank")


def _read(path: Path) -> tuple[int, str]:
    try:
        train = open_split(path, "train")
        train.__getitems__([0])
    except UserError as problem:
        return 0, str(problem)
    return len(train), ""
