"""Tests that a run folder has one job at a time, and that files of killed jobs are removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from files.test_lock import another_process_in
from train.launches import JOB, launch, make_store

LEFT = (".curves.png.another.1.01234567.part", "checkpoints/.writing-step-00000009")


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["train"],
        pytest.param(["compare", "--methods", "bsp, hierarchical sync_every=2"], marks=pytest.mark.long),
    ],
)
def test_the_second_job_ends_and_the_next_one_tidies_up(tmp_path: Path, command: list[str]) -> None:
    make_store(tmp_path / "small.h5")
    (tmp_path / "job.toml").write_text(JOB)
    name, *options = command
    folder = tmp_path / "runs" / ("job" if name == "train" else "job-compare")
    words = [name, "job.toml", *options, "--resume"]
    assert launch(tmp_path, *words, n=2).code == 0
    before = {path.name for path in folder.iterdir()}
    left = [folder / each for each in (LEFT if name == "train" else LEFT[:1])]
    for each in left:
        each.mkdir()
    with another_process_in(folder) as process:
        done = launch(tmp_path, *words, n=2)
        assert done.code == 1
        (line,) = done.messages
        assert f"runs/{folder.name}: in use by process {process.pid} of Slurm job 4711 on " in line
        assert "Traceback" not in done.err
        assert all(each.exists() for each in left)
    assert launch(tmp_path, *words, n=2).code == 0
    assert {path.name for path in folder.iterdir()} == before
    assert not any(each.exists() for each in left)
