from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import programs
from hpcsgd.config.schema import Config, load
from hpcsgd.errors import UserError
from hpcsgd.report import run_folder
from hpcsgd.report.run_folder import (
    log_into,
    open_run_folder,
    owned,
    write_config,
    write_summary,
    write_versions,
)

JOB = """\
data = {path = "x.h5", group_batch_size = 4}
model = {name = "mlp"}
optimizer = {lr = 0.1}
method = {name = "hierarchical", sync_every = 8}
training = {epochs = 2}
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.chdir(tmp_path)
    Path("first.toml").write_text(JOB)
    return load(Path("first.toml"))


@pytest.fixture
def folder(config: Config) -> Path:
    """A run folder that has its configuration."""
    open_run_folder(config.run.output_dir, resume=False)
    write_config(config.run.output_dir, config)
    return config.run.output_dir


def test_the_resolved_configuration_is_kept_and_starts_the_same_run(config: Config, folder: Path) -> None:
    assert folder == Path("runs/first")
    assert load(folder / "job.toml") == config


def test_a_folder_in_use_is_refused_unless_resuming(folder: Path) -> None:
    with pytest.raises(
        UserError, match=r"^runs/first: holds a run: pass --resume .* another \[run\] output_dir$"
    ):
        open_run_folder(folder, resume=False)
    open_run_folder(folder, resume=True)
    assert [path.name for path in folder.iterdir()] == ["job.toml"]


def test_a_folder_that_cannot_be_is_a_user_error(config: Config) -> None:
    Path("runs").write_text("a file")
    with pytest.raises(UserError, match=r"^runs/first: cannot be used as \[run\] output_dir: "):
        open_run_folder(config.run.output_dir, resume=False)


def test_resuming_unchanged_says_nothing(
    config: Config, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_config(folder, config)
    assert not caplog.records


def test_resuming_changed_names_the_keys_in_one_warning(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    overrides = ["--training.epochs=3", "--method.sync_every=4", "--training.checkpoint_every_steps=5"]
    changed = load(Path("first.toml"), overrides)
    write_config(folder, changed)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.message == (
        "resuming with another configuration than before: "
        "method.sync_every 8 → 4, training.epochs 2 → 3, training.checkpoint_every_steps default → 5"
    )
    assert load(folder / "job.toml") == changed


def test_versions_hold_every_start_and_the_state_of_the_repository(folder: Path) -> None:
    write_versions(folder, mpi=None, groups=2, group_size=3)
    git = "git -c user.name=n -c user.email=e"
    for command in ("git init -q", "git add first.toml", f"{git} commit -qm first"):
        programs.run(command.split())
    ways = {"intra_group": "nccl 2.27.3", "inter_group": "mpi"}
    devices = {"cuda:0": 8, "cuda:1": 4}
    write_versions(folder, mpi="MPICH 5", groups=4, group_size=3, devices=devices, device_backend=ways)
    first, second = json.loads((folder / "versions.json").read_text())
    assert (first["P"], first["K"], first["mpi"], first["git"]) == (2, 3, None, None)
    assert (second["P"], second["mpi"], second["device_backend"]) == (4, "MPICH 5", ways)
    assert (first["devices"], second["devices"]) == ({}, devices)
    assert len(second["git"]["commit"]) == 40
    assert second["git"]["dirty"] is True  # the run folder itself is not committed
    assert second["packages"]["torch"]
    assert {"python", "host", "platform", "command", "started"} <= second.keys()


def test_the_log_goes_to_the_folder_and_is_appended_to(folder: Path) -> None:
    for word in ("one", "two"):
        with log_into(folder):
            logging.getLogger("hpcsgd.train.loop").warning("line %s", word)
    logging.getLogger("hpcsgd").warning("line three")
    lines = (folder / "run.log").read_text().splitlines()
    assert [line.split(" WARNING ")[1] for line in lines] == ["line one", "line two"]


def test_the_summary_is_json(folder: Path) -> None:
    write_summary(folder, {"accuracy": 0.5, "loss": None})
    assert json.loads((folder / "summary.json").read_text()) == {"accuracy": 0.5, "loss": None}


@pytest.mark.parametrize("text", ["{", "{}", "5", "[" * 100_000, ""])
def test_damaged_versions_are_one_line(folder: Path, text: str) -> None:
    (folder / "versions.json").write_text(text)
    with pytest.raises(
        UserError, match=r"^runs/first/versions.json: not .*; move it away to go on without it$"
    ):
        write_versions(folder, mpi=None, groups=1, group_size=1)
    assert (folder / "versions.json").read_text() == text


def test_the_folder_is_one_process_s_and_what_killed_ones_left_is_gone(config: Config) -> None:
    folder = config.run.output_dir
    folder.mkdir(parents=True)
    (folder / "run.lock").touch()  # as left by a process that was killed right after its start
    (folder / ".x.another.1.01234567.part").touch()
    with pytest.raises(UserError, match=r"holds a run"):
        open_run_folder(folder, resume=False)
    with owned(folder, resume=True):
        assert [path.name for path in folder.iterdir()] == ["run.lock"]
    assert not any(folder.iterdir())
    with owned(folder, resume=False):
        pass


def test_a_job_that_waited_for_the_lock_does_not_go_on_in_the_other_s_run(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both jobs are started at once: the other one trains while this one waits."""
    folder, take = config.run.output_dir, run_folder.locked

    @contextmanager
    def late(path: Path) -> Iterator[None]:
        (path / ".x.another.1.01234567.part").touch()
        (path / "job.toml").touch()
        with take(path):
            yield

    monkeypatch.setattr(run_folder, "locked", late)
    with pytest.raises(UserError, match=r"^runs/first: holds a run"), owned(folder, resume=False):
        pass
    assert len(list(folder.iterdir())) == 2, "it has left the folder as it was"
    with owned(folder, resume=True):
        pass


def test_a_folder_that_cannot_be_written_is_one_line(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "open", refused)
    line = r"^runs/first: cannot be used as \[run\] output_dir: Read-only file system$"
    with pytest.raises(UserError, match=line), owned(config.run.output_dir, resume=False):
        pass
