"""Tests that resources do not grow over a thousand steps, and that memory is what the formula predicts."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import programs
from pythons import HERE
from train.launches import JOB, ended, launch, make_store, start
from train.long_run import METHODS

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(300)]

NOISE = 2**18
"""The bytes by which the memory of allocators may vary."""
Resources = dict[str, int]


def require_no_growth(seen: Sequence[Resources]) -> None:
    """Require that nothing has grown. What leaks grows between any two records.

    MPICH allocates two megabytes at one of the steps: when a message first arrives before it is asked for.
    """
    first, last = seen[0], seen[-1]
    assert last["threads"] == first["threads"]
    assert last["files"] == first["files"]
    assert last["tensors"] <= first["tensors"]
    assert min(after["bytes"] - before["bytes"] for before, after in pairwise(seen)) <= NOISE


@pytest.mark.parametrize("method", METHODS)
def test_a_rank_has_what_the_formula_says_and_does_not_grow(method: str, tmp_path: Path) -> None:
    """A rank may use up to three models more than the formula says.

    This is memory that lives within a step, such as gradients of a layer, terms of an optimizer, codes and
    copies for D, and memory that an allocator keeps for later.
    """
    program = [sys.executable, str(HERE / "train" / "long_run.py"), method]
    end = ended(start(tmp_path, [programs.mpiexec(), "-n", "4", *program], PYTHONPATH=str(HERE)))
    assert end.code == 0, end.err
    for rank in range(4):
        told: dict[str, Any] = json.loads((tmp_path / f"seen-{rank}").read_text())
        print(rank, told)
        require_no_growth(told["seen"])
        assert 0.95 * told["expected"] <= told["grown"] <= told["expected"] + 3 * told["model"]


def test_a_run_does_not_grow(tmp_path: Path) -> None:
    """The run has loaders, metrics, evaluations and checkpoints, none of which is being written then."""
    make_store(tmp_path / "small.h5")
    shutil.copy(HERE / "train" / "watched.py", tmp_path)
    model = '"watched:Watched"\narguments = { inputs = 36, passes = [249, 583, 916, 1249] }'
    job = JOB.replace('"mlp"\narguments = { inputs = 36, hidden = [8] }', model)
    (tmp_path / "job.toml").write_text(job.replace("epochs = 1\nlog_every = 1", EVERYTHING))
    end = launch(tmp_path, "train", "job.toml", "--parallel.groups", "2", n=2)
    assert end.code == 0, end.err
    seen = [file.read_text().splitlines() for file in tmp_path.glob("seen-*")]
    assert len(seen) == 2
    for lines in seen:
        print(os.linesep.join(lines))
        require_no_growth([json.loads(line) for line in lines])


EVERYTHING = """\
epochs = 1300
steps = 1255
eval_every_epochs = 100
checkpoint_every_steps = 50
"""
