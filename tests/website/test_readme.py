"""The README is short, and its script runs unchanged. test_outputs.py runs it on four ranks."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import outputs
import programs
from pythons import python

ROOT = Path(__file__).parents[2]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.slow
def test_the_script_runs_on_one_rank(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    (tmp_path / "train.py").write_text(outputs.script())
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = programs.run(python("train.py"), cwd=tmp_path, env=environment)
    assert re.fullmatch(
        r"groups    1, ranks per group 1, on \w+\ntraining  880 steps, last loss 0\.\d+\n"
        r"test      accuracy 0\.\d+\n",
        done.stdout,
    )
