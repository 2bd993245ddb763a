"""Tests of when the scheduler ends this job; its commands are called if the environment does not say."""

from __future__ import annotations

import logging
import os
import signal
import time
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from hpcsgd.comm import Communicator, threads
from hpcsgd.train.job_end import pbs_end, seconds_left, slurm_end
from hpcsgd.train.stopping import Reasons, Stopping

# Output of Slurm 22.05, shortened.
RUNNING = """JobId=4 JobName=train
   RunTime=00:00:05 TimeLimit=01:00:00 TimeMin=N/A
   SubmitTime=2026-11-21T10:43:43 EligibleTime=2026-11-21T10:43:43
   StartTime=2026-11-21T10:43:43 EndTime=2026-11-21T11:43:43 Deadline=N/A
"""


NOW = datetime(2026, 11, 21, 11, 0).timestamp()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the time to eleven o'clock, however long a command takes to answer."""
    monkeypatch.setattr("time.time", lambda: NOW)
    for name in ("SLURM_JOB_ID", "PBS_JOBID", "FLUX_JOB_ID"):
        monkeypatch.delenv(name, raising=False)


def test_outside_of_batch_jobs():
    assert seconds_left({}) is None


def test_newer_versions_tell():
    assert seconds_left({"SLURM_JOB_ID": "4", "SLURM_JOB_END_TIME": str(int(NOW) + 100)}) == 100


@pytest.mark.parametrize(
    ("array", "name"), [({}, "4"), ({"SLURM_ARRAY_JOB_ID": "4", "SLURM_ARRAY_TASK_ID": "2"}, "4_2")]
)
def test_older_versions_are_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, array: dict[str, str], name: str
):
    """A task of an array is queried by its own name, because its number may stand for all tasks."""
    soon = datetime.fromtimestamp(NOW + 50).isoformat()
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        f'#!/bin/sh\n[ "$*" = "show job {name}" ] && echo "StartTime=x EndTime={soon} Deadline=N/A"\n'
    )
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert seconds_left({"SLURM_JOB_ID": "4", **array}) == 50


def test_the_users_format_of_times_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    soon = datetime.fromtimestamp(NOW + 50).isoformat()
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        f'#!/bin/sh\n[ "$SLURM_TIME_FORMAT" = standard ] && echo "EndTime={soon}" || echo "EndTime=18:30"\n'
    )
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    assert seconds_left({"SLURM_JOB_ID": "4"}) == 50


def test_nobody_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert seconds_left({"SLURM_JOB_ID": "4"}) is None
    assert "the end of Slurm job 4 is not known" in caplog.text


def test_what_scontrol_prints():
    assert slurm_end(RUNNING) == datetime(2026, 11, 21, 11, 43, 43).timestamp()
    assert slurm_end(RUNNING.replace("EndTime=2026-11-21T11:43:43", "EndTime=Unknown")) is None


# From the tests of OpenPBS, shortened.
PBS_JOB = """Job Id: 12.pbs
    Job_Name = train
    resources_used.walltime = 00:00:05
    job_state = R
    Resource_List.ncpus = 4
    Resource_List.walltime = 01:30:10
    stime = Sat Nov 21 10:43:43 2026
    session_id = 16971
"""


def test_what_qstat_prints():
    assert pbs_end(PBS_JOB) == datetime(2026, 11, 21, 12, 13, 53).timestamp()
    assert pbs_end(PBS_JOB.replace("Resource_List.walltime", "resources_used.cput")) is None
    assert pbs_end(PBS_JOB.replace("stime", "qtime")) is None, "it waits"


def stand_in(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_pbs_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    stand_in(tmp_path, "qstat", f'[ "$*" = "-f 12.pbs" ] && echo "{PBS_JOB}"')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    of_script = {"PBS_JOBID": "12.pbs", "HPCSGD_PBS_END": str(NOW + 5)}
    assert seconds_left(of_script) == (73 * 60 + 53), "it knows better than the script"
    stand_in(tmp_path, "qstat", "exit 255")
    assert seconds_left(of_script) == 5
    monkeypatch.setenv("PATH", "")
    assert seconds_left(of_script) == 5


def test_of_several_schedulers_the_first_one_that_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Flux may run inside a job of Slurm and have its own jobs."""
    stand_in(tmp_path, "flux", "echo 30")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("FLUX_JOB_ID", "f1")
    for left, first in ((20, 20), (40, 30)):
        slurm = {"SLURM_JOB_ID": "4", "SLURM_JOB_END_TIME": str(int(NOW) + left)}
        assert seconds_left({**os.environ, **slurm}) == first


# The first two numbers are those of `flux run` and of the enclosing job.
@pytest.mark.parametrize(
    ("own", "around", "left"), [(4294967295, 50, 50), (20, 50, 20), (4294967295, 4294967295, None)]
)
def test_flux_is_asked(
    own: int, around: int, left: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    answers = (
        f'[ "$*" = "job timeleft" ] && if [ -n "$FLUX_JOB_ID" ]; then echo {own}; else echo {around}; fi'
    )
    stand_in(tmp_path, "flux", answers)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("FLUX_JOB_ID", "f1")
    assert seconds_left(os.environ) == left


@pytest.mark.parametrize(("variable", "command"), [("PBS_JOBID", "qstat"), ("FLUX_JOB_ID", "flux")])
def test_a_scheduler_that_does_not_answer(
    variable: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):  # fmt: skip
    stand_in(tmp_path, command, "echo 'cannot connect to server' >&2; exit 255")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert seconds_left({variable: "4", "PATH": os.environ["PATH"]}) is None
    assert "job 4 is not known" in caplog.text


@pytest.mark.parametrize(
    ("left", "elapsed", "stops"), [(600, 535, False), (600, 545, True), (100, 85, False), (100, 95, True)]
)
def test_a_run_stops_ahead_of_the_end(
    left: int, elapsed: int, stops: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """It stops 60 s before the end, or a tenth of the remaining time if that is less."""
    monkeypatch.setenv("SLURM_JOB_ID", "4")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(NOW) + left))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    caplog.set_level(logging.INFO, "hpcsgd")
    began = time.monotonic()

    def rank(world):
        stopping = Stopping(Reasons(None, stop_ahead=60, asks_scheduler=True), world.dup_with_thread())
        monkeypatch.setattr("time.monotonic", lambda: began + elapsed)
        assert stopping.now() is None  # the first call only asks
        return stopping.now()

    assert threads.run(1, rank) == ["the batch job ends soon" if stops else None]
    assert "this batch job ends in" in caplog.text


def test_all_ranks_are_given_the_reason_of_one_at_once() -> None:
    def asked(world: Communicator) -> list[str | None]:
        reasons = SimpleNamespace(now=lambda: signal.SIGUSR1 if world.rank == 1 and begun else 0)
        stopping, begun = Stopping(cast(Reasons, reasons), world.dup_with_thread()), []
        before = [stopping.now(), stopping.at_once()]  # the first one asks, and the other one asks again
        begun.append(True)
        return [*before, stopping.at_once()]

    assert threads.run(3, asked) == [[None, None, "SIGUSR1 received"]] * 3
