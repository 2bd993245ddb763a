"""Tests that a run whose parameters arrive in the next forward pass has the bits of plain steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from train.interruptions import (
    assert_interruptions_change_nothing,
    assert_same_outcome,
    train,
    without_pictures,
)
from train.launches import JOB, make_store

WORDS = (
    "--parallel.groups 2 --data.group_batch_size 8 --training.epochs 2 --training.checkpoint_every_steps 2"
)
SMALL = ("--model.name", "train.small:steady", "--model.arguments", "{ inputs = 36 }")
OPTIONS = (*WORDS.split(), *SMALL, "--training.bucket_cap_mb", "1e-5")
PLAIN = 'name = "hierarchical"\nsync_every = 2'


@pytest.mark.slow
@pytest.mark.parametrize("method", [PLAIN, 'name = "bsp"'], ids=["hierarchical", "bsp"])
def test_a_run_has_the_bits_of_one_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    without_pictures(monkeypatch)
    make_store(tmp_path / "small.h5")
    (tmp_path / "job.toml").write_text(JOB.replace(PLAIN, method))
    job, plain = tmp_path / "job.toml", tmp_path / "plain"
    train(job, plain, *OPTIONS, n=4)
    assert_interruptions_change_nothing(job, tmp_path, *OPTIONS, "--training.overlap_param_gather", "true")
    assert_same_outcome(plain, tmp_path / "whole")
