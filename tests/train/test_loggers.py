"""Tests of runs with loggers, as users start them: a resumed run continues its loggers' runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcsgd.report.metrics import Record, read
from hpcsgd.report.run_folder import replica_group_folder
from report.test_loggers import USER, drawn_by_tensorboard
from train.launches import JOB, launch, make_store

LOGGERS = 'loggers = ["tensorboard", { name = "user:MyLogger" }, "user:Refuses", "user:Stubborn"]\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_store(tmp_path / "small.h5")
    (tmp_path / "user.py").write_text(USER.replace("time.sleep, args=(1000,)", "time.sleep, args=(20,)"))
    (tmp_path / "job.toml").write_text(JOB + "[run]\n" + LOGGERS)
    return tmp_path


def told(run: Path) -> list[Record]:
    return [json.loads(line) for line in (run / "loggers" / "told").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_run_that_goes_on_is_one_run_of_its_loggers(folder: Path) -> None:
    """A logger that fails is reported, and the run continues."""
    run = folder / "runs" / "job"
    words = ["--run.loggers", '["tensorboard", "user:MyLogger", "user:Refuses"]']
    done = launch(folder, "train", "job.toml", *words, n=2)
    assert done.code == 0, done.err
    assert (
        done.out.count("logger Refuses: ended, and gets no more of this run: OSError: no route to the server")
        == 1
    )
    done = launch(folder, "train", "job.toml", *words, "--resume", "--training.epochs", "2", n=2)
    assert done.code == 0, done.err
    records = told(run)
    first, second = (record for record in records if "began" in record)
    assert first["began"] == second["began"] == (run / "loggers" / "id").read_text().strip()
    assert (first["resumed"], second["resumed"]) == (0, 3)
    assert [record for record in records if "kind" in record] == read(run / "metrics.jsonl")
    assert [record["failed"] for record in records if "failed" in record] == [False, False]
    losses = [(r["step"], r["loss"]) for r in read(run / "metrics.jsonl") if r["kind"] == "step"]
    drawn = drawn_by_tensorboard(run)["step/loss"]
    assert [step for step, _ in drawn] == [step for step, _ in losses] == [1, 2, 3, 4, 5, 6]
    assert [loss for _, loss in drawn] == pytest.approx([loss for _, loss in losses])


@pytest.mark.slow
def test_a_run_that_dies_takes_its_sinks_along(folder: Path) -> None:
    words = ["--run.loggers", '["user:MyLogger", "user:Sleeps"]', "--optimizer.lr", "1e30"]
    done = launch(folder, "train", "job.toml", *words, n=2)
    assert done.code == 1
    (message,) = done.messages
    assert "the loss is" in message
    assert told(folder / "runs" / "job")[-1] == {"failed": True}


@pytest.mark.long
def test_each_group_has_its_own(folder: Path) -> None:
    job = (folder / "job.toml").read_text().replace("hierarchical", "ensemble_sync")
    (folder / "job.toml").write_text(job.replace(LOGGERS, 'loggers = ["user:MyLogger"]\n'))
    done = launch(folder, "launch", "job.toml", "--groups", "2")
    assert done.code == 0, done.err
    runs = [replica_group_folder(folder / "runs" / "job", replica_group) for replica_group in range(2)]
    for replica_group, run in enumerate(runs):
        began, *records, ended = told(run)
        assert (began["name"], began["group"]) == (f"job/replica_groups/{replica_group}", "job")
        assert records == read(run / "metrics.jsonl")
        assert ended == {"failed": False}
    assert told(runs[0])[0]["began"] != told(runs[1])[0]["began"]


@pytest.mark.slow
def test_what_is_wrong_is_reported_before_groups_are_started(folder: Path) -> None:
    job = (folder / "job.toml").read_text().replace("hierarchical", "ensemble_sync")
    (folder / "job.toml").write_text(job)
    done = launch(folder, "launch", "job.toml", "--groups", "2", "--run.loggers", '["wandbb"]')
    assert done.code == 1
    assert done.err == (
        "hpcsgd: job.toml: [run] loggers: no 'wandbb'; did you mean 'wandb'? Allowed: mlflow, tensorboard, "
        'wandb, or "package.module:function"\n'
    )
    assert not (folder / "runs").exists()
