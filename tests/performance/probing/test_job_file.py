"""`hpcsgd probe` as users start it, and training with its answer."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from hpcsgd.config.schema import Config, load
from hpcsgd.errors import UserError
from hpcsgd.performance.probing.job_file import plan_of
from hpcsgd.train.monitor import DistanceMonitor
from hpcsgd.train.probe_answer import fitting, setting, take_answer
from train.launches import JOB, launch, make_store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_store(tmp_path / "small.h5", train=400)
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path


@pytest.fixture
def config(folder: Path) -> Config:
    return load(folder / "job.toml")


@pytest.mark.slow
def test_the_command_on_two_ranks(folder: Path) -> None:
    scaled = ("job.toml", "--lr_schedule.scaling", "linear")
    ended = launch(folder, "probe", *scaled, "--groups", "2,4", "--ranks", "12", "--offload-dir", ".", n=2)
    assert ended.code == 0, ended.err
    assert "\n   2       0.2 " in ended.out
    assert "P = " in ended.out
    found = json.loads((folder / "runs" / "job-probe" / "probe.json").read_text())
    assert f"for 12 ranks: {found['P']} groups of K = {12 // found['P']}" in ended.out
    assert (folder / "runs" / "job-probe" / "probe.png").read_bytes().startswith(b"\x89PNG")
    probe = ("--probe", "runs/job-probe/probe.json")
    found["rows"][-1]["D"] = found["rows"][0]["D"] = 1e-3
    (folder / "runs" / "job-probe" / "probe.json").write_text(json.dumps(found))
    trained = launch(folder, "train", *scaled, *probe, "--training.epochs", "2", n=2)
    assert trained.code == 0, trained.err
    assert "2 groups of 1 rank," in trained.out
    assert "was of another training" not in trained.out
    assert "step 8: the distance between groups is larger than probed (D = " in trained.out


SELSYNC = ("--method.name", "selsync", "--method.delta", "0.3")


@pytest.mark.slow
def test_which_delta(folder: Path) -> None:
    """The job's own delta is not used in these steps, because all groups synchronize."""
    text = (folder / "job.toml").read_text().replace("sync_every = 2", "")
    (folder / "job.toml").write_text(text)
    ended = launch(
        folder, "probe", "job.toml", "--delta", "--steps", "60", "--parallel.groups", "2", *SELSYNC, n=2
    )
    assert ended.code == 0, ended.err
    assert "59 steps of 2 groups, all of them shared\n LSSR          δ     syncs  sends 1/\n" in ended.out
    found = json.loads((folder / "runs" / "job-delta" / "delta.json").read_text())
    assert found["setting"]["method"]["delta"] == 0
    assert len(found["deltas"]) == 59
    assert (folder / "runs" / "job-delta" / "delta.png").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--delta", "--steps", "1", *SELSYNC],
            "hpcsgd: --steps 1: at least 2 are needed, the first one has",
        ),
        (["--delta"], "hpcsgd: job.toml: [method] name = 'hierarchical': it has no delta to probe, as"),
        (["--groups", "4,2"], "hpcsgd: groups = [4, 2]: expected growing numbers, as 2, 4, 8"),
        (["--groups", "1"], "hpcsgd: groups = [1]: at least two numbers of groups from 2 on can be compared"),
        (["--groups", "few"], "hpcsgd: --groups few: expected numbers, as 2,4,8"),
        (
            ["--offload-dir", "nowhere"],
            "hpcsgd: nowhere: no place for idle models: No such file or directory",
        ),
        (["--repeats", "0"], "hpcsgd: --repeats 0: at least 1 is needed"),
        (
            ["--groups", "2,500"],
            "hpcsgd: 400 samples cannot be divided among 500 ranks: each needs at least one",
        ),
        (["--optimizer.lr", "1e30"], "hpcsgd: the loss with one group is "),
        (["--optimizer.lr", "1e-300"], "hpcsgd: D = 0 with 2 groups: their models stay equal"),
        (["--method.name", "bsp"], "hpcsgd: job.toml: [method]: "),
    ],
)
def test_bad_input(folder: Path, words: list[str], message: str) -> None:
    ended = launch(folder, "probe", "job.toml", *words)
    assert ended.code == 1, ended.out + ended.err
    assert [line for line in ended.messages if line.startswith(message)], ended.err
    assert "Traceback" not in ended.err
    assert not (folder / "runs").exists()


def test_a_method_that_the_distance_cannot_judge(folder: Path) -> None:
    (folder / "bsp.toml").write_text(JOB.replace('name = "hierarchical"\nsync_every = 2', 'name = "bsp"'))
    with pytest.raises(UserError, match=r"name = 'bsp': the probe needs a method that averages models after"):
        plan_of(load(folder / "bsp.toml"), folder / "bsp.toml", None, 1)


def test_a_rate_that_is_not_scaled_is_warned_of(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = folder / "job.toml"
    plan_of(load(path, ["--lr_schedule.scaling", "linear"]), path, None, 1)
    assert "scaling = none" not in caplog.text
    plan_of(load(path), path, None, 1)
    assert "[lr_schedule] scaling = none: the paper's rule assumes a learning rate that grows" in caplog.text


def test_a_sparse_gradient_reduction_is_not_probed(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    sparse = ("--method.grad_reduce", '{name="sparse",sparsifier={name="deft",density=0.1}}')
    assert plan_of(load(folder / "job.toml", sparse), folder / "job.toml", None, 1).sync_every == 2
    assert "the probe reduces whole gradients" in caplog.text


def answered(config: Config, folder: Path, P: int, unclear: int | None = None) -> Path:
    file = folder / "probe.json"
    rows = [{"P": 4, "D": 1.5, "lr": 0.4, "diverged": None}]
    file.write_text(json.dumps({"P": P, "unclear": unclear, "setting": setting(config), "rows": rows}))
    return file


def test_the_answer_is_taken(config: Config, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    taken, monitor = take_answer(config, answered(config, folder, 4), 8)
    assert (taken.parallel.groups, taken.parallel.group_size) == (4, None)
    assert monitor == DistanceMonitor(4, 1.5, 0.4)
    assert take_answer(config, answered(config, folder, 4), 6)[1] is None  # 3 groups were not probed
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_the_answer_is_cut_to_the_ranks() -> None:
    assert [fitting(8, ranks) for ranks in (4, 8, 12, 20, 7)] == [4, 8, 6, 5, 7]


def test_a_probe_of_another_training_warns(
    config: Config, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    probe = answered(config, folder, 4)
    take_answer(load(folder / "job.toml", ["--data.group_batch_size", "8"]), probe, 8)
    assert "was of another training: data.group_batch_size 16 → 8" in caplog.text


def test_what_is_not_clear_is_said(config: Config, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    take_answer(config, answered(config, folder, 4, unclear=8), 8)
    assert "not clear between 4 and 8 groups" in caplog.text


@pytest.mark.parametrize("text", ["", "{}", '{"P": "few", "setting": {}}', "[1]"])
def test_a_file_that_is_no_probe(config: Config, folder: Path, text: str) -> None:
    (folder / "probe.json").write_text(text)
    with pytest.raises(UserError, match=r"probe.json: not the probe.json of a probe"):
        take_answer(config, folder / "probe.json", 8)
