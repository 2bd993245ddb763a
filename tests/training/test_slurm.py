"""When does Slurm end this job? Asked of the environment, and of scontrol where that does not tell."""

from __future__ import annotations

import logging
import os
import time
from datetime import datetime
from pathlib import Path

import pytest

from hpcsgd.training.slurm import end_time, seconds_left
from hpcsgd.training.stopping import Reasons, Stopping
from hpcsgd.transport import threads

# As printed by Slurm 22.05, cut.
RUNNING = """JobId=4 JobName=train
   RunTime=00:00:05 TimeLimit=01:00:00 TimeMin=N/A
   SubmitTime=2026-11-21T10:43:43 EligibleTime=2026-11-21T10:43:43
   StartTime=2026-11-21T10:43:43 EndTime=2026-11-21T11:43:43 Deadline=N/A
"""


def test_outside_of_slurm():
    assert seconds_left({}) is None


def test_newer_versions_tell():
    left = seconds_left({"SLURM_JOB_ID": "4", "SLURM_JOB_END_TIME": str(int(time.time()) + 100)})
    assert left is not None
    assert 98 < left <= 100


def test_older_versions_are_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    soon = datetime.fromtimestamp(int(time.time()) + 50).isoformat()
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        f'#!/bin/sh\n[ "$*" = "show job 4" ] && echo "StartTime=x EndTime={soon} Deadline=N/A"\n'
    )
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    left = seconds_left({"SLURM_JOB_ID": "4"})
    assert left is not None
    assert 48 < left <= 50


def test_nobody_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert seconds_left({"SLURM_JOB_ID": "4"}) is None
    assert "the end of Slurm job 4 is not known" in caplog.text


def test_what_scontrol_prints():
    assert end_time(RUNNING) == datetime(2026, 11, 21, 11, 43, 43).timestamp()
    assert end_time(RUNNING.replace("EndTime=2026-11-21T11:43:43", "EndTime=Unknown")) is None


@pytest.mark.parametrize(
    ("left", "elapsed", "stops"), [(600, 535, False), (600, 545, True), (100, 85, False), (100, 95, True)]
)
def test_a_run_stops_ahead_of_the_end(
    left: int, elapsed: int, stops: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """By 60 s, or a tenth of what is left where that is less."""
    monkeypatch.setenv("SLURM_JOB_ID", "4")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + left))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    caplog.set_level(logging.INFO, "hpcsgd")
    began = time.monotonic()

    def rank(world):
        stopping = Stopping(Reasons(None, stop_ahead=60, asks_slurm=True), world.apart())
        monkeypatch.setattr("time.monotonic", lambda: began + elapsed)
        assert stopping.now() is None  # it has only asked
        return stopping.now()

    assert threads.run(1, rank) == ["the Slurm job ends soon" if stops else None]
    assert "this Slurm job ends in" in caplog.text
