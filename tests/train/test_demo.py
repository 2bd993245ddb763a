"""Test of the job of `make demo`: on four MPI ranks it reaches its accuracy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from train.launches import launch

JOB_FILE = Path(__file__).parents[2] / "examples" / "digits.toml"


def test_handwritten_digits_are_learnt_on_four_ranks(tmp_path: Path) -> None:
    shutil.copy(JOB_FILE, tmp_path)
    converted = launch(tmp_path, "data", "convert", "digits", "digits.h5")
    assert converted.code == 0, converted.err
    trained = launch(tmp_path, "train", JOB_FILE.name, n=4)
    assert trained.code == 0, trained.err
    by, shape, *_ = trained.out.splitlines()
    assert by.startswith("4 ranks by mpi: ")
    assert shape.startswith("2 groups of 2 ranks, ")
    summary = json.loads((tmp_path / "runs/digits/summary.json").read_text())
    assert summary["accuracy"] > 0.99
