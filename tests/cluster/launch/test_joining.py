"""Tests of the launcher of one group in a run whose other groups are started elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import programs
from cluster.launch.slow_runs import prepare
from hpcsgd.cluster.launch import replica_group as launching
from hpcsgd.cluster.launch.replica_group import _made_or_joined
from hpcsgd.config.reader import read_toml
from hpcsgd.config.schema import Config, load
from hpcsgd.elastic import event_log
from hpcsgd.elastic.journal import FOLDER, TermJournal, claim
from hpcsgd.elastic.register import Member, Phase, Register
from hpcsgd.errors import UserError
from hpcsgd.report import run_folder
from hpcsgd.report.run_folder import replica_group_folder


@pytest.fixture
def job(tmp_path: Path) -> Path:
    prepare(tmp_path)
    return tmp_path / "job.toml"


@pytest.mark.parametrize("others", ["begin", "have begun"])
def test_a_folder_that_was_made_by_hand(job: Path, monkeypatch: pytest.MonkeyPatch, others: str) -> None:
    """The first group to come owns the folder, even if another one comes at the same moment."""
    run = job.parent / "run"
    terms = run / FOLDER
    write = run_folder.write_config

    def meanwhile(folder: Path, config: Config) -> None:
        write(folder, config)
        if others == "begin":
            terms.mkdir()

    monkeypatch.setattr(run_folder, "write_config", meanwhile)
    run.mkdir()
    config = load(job, ["--run.output_dir", str(run)])
    assert not _made_or_joined(job, run, config, 2, resume=False)
    assert terms.is_dir()
    assert read_toml(run / "job.toml")["optimizer"]["lr"] == 0.1


class Recorded:
    """A record of what `launch_replica_group` would have started, which ends in the way the test chooses."""

    def __init__(self) -> None:
        self.told: dict[str, Any] = {}
        self.reported: list[Path] = []
        self.fault = self.another = False

    def elected(self, folder: Path, replica_group: int, **told: Any) -> None:
        self.told = told

    def supervisor(self, *words: Any, **options: Any) -> Recorded:
        return self

    async def run(self) -> int:
        if self.another:
            replica_group_folder(Path("run"), 1).mkdir()
        return 1 if self.fault else 75

    def launch(self, replica_group: int, *overrides: str) -> int:
        words = ["--run.output_dir", "run", *overrides]
        return launching.launch_replica_group(
            Path("job.toml"), replica_group, words, groups=2, group_size=2, host="127.0.0.1"
        )


@pytest.fixture
def recorded(job: Path, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    programs.mpiexec()
    monkeypatch.chdir(job.parent)
    here = Recorded()
    monkeypatch.setattr(launching, "CoordinatorElection", here.elected)
    monkeypatch.setattr(launching, "Supervisor", here.supervisor)
    monkeypatch.setattr(launching, "report", here.reported.append)
    return here


def test_what_is_reported_to_the_coordinator(recorded: Recorded) -> None:
    assert recorded.launch(1) == 75
    assert (recorded.told["replica_groups"], recorded.told["budget"]) == (2, None)
    moves = ("--rebalance.resource", "samples", "--rebalance.total", "64", "--run.output_dir", "another")
    assert recorded.launch(1, *moves) == 75
    assert recorded.told["budget"]["resource"] == "samples"
    assert recorded.reported == [], "nobody has met"


def test_the_first_member_reports(recorded: Recorded) -> None:
    recorded.launch(1)
    assert claim(Path("run") / FOLDER, 1)
    members = tuple(Member(replica_group, ("a:1",), 7) for replica_group in (0, 1))
    TermJournal(Path("run") / FOLDER, 1).write(Register(1, 7, 7, Phase.RUN, members))
    for replica_group in (1, 0):
        recorded.launch(replica_group)
    assert recorded.reported == [Path("run")]


@pytest.mark.parametrize("another", [False, True])
def test_a_folder_whose_job_file_is_at_fault(recorded: Recorded, another: bool) -> None:
    """The folder is removed unless other groups have joined the run."""
    recorded.fault, recorded.another = True, another
    assert recorded.launch(0) == 1
    assert Path("run").exists() == another


def test_a_damaged_event_log_is_one_line_before_anything_is_started(recorded: Recorded) -> None:
    recorded.launch(1)
    recorded.told.clear()
    log = replica_group_folder(Path("run"), 1) / event_log.NAME
    log.write_text("{\n")
    with pytest.raises(UserError, match=rf"^{log}:1: not an event of an event log"):
        recorded.launch(1)
    assert not recorded.told
