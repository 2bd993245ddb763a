"""Tests of when the job of a single replica group is requeued: the script, with stand-ins for commands."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import pytest

import programs
from hpcsgd.cluster.batch.script import template
from hpcsgd.elastic.event_log import EventLog

# A training that commits rounds, or not, and ends with the given exit code.
COMMANDS = """#!/bin/sh
case "${0##*/}" in
  scontrol) echo "$*" > again ;;
  sleep) ;;
  python)
    echo "$*" > words
    [ -z "$ROUND" ] || cat "$ROUND" >> runs/job/coordinators/1/events.jsonl
    [ -z "$TERM_TO_SHELL" ] || kill -TERM $PPID
    exit $CODE ;;
esac
"""


class Ended(NamedTuple):
    code: int
    said: str
    again: str
    """The job that was requeued; empty if there is none."""
    words: str


def run(folder: Path, *words: str, code: int, met: tuple[int, ...] = (), **environment: str) -> Ended:
    """Run the script as group 1 of an array; `met` has the groups of a round that happens meanwhile."""
    for name in ("python", "scontrol", "sleep"):
        (folder / name).write_text(COMMANDS)
        (folder / name).chmod(0o755)
    (folder / "runs" / "job" / "coordinators" / "1").mkdir(parents=True)
    before = {"generation": 1, "t": 4, "epoch": 0, "fraction": 0.5}
    with EventLog(folder / "runs" / "job" / "coordinators" / "1" / "events.jsonl") as log:
        log.commit(rounds=1, members=[0, 1], counted=[0, 1], **before)
    with EventLog(folder / "round") as log:
        log.commit(rounds=2, members=met, counted=met, **before)
    (folder / "script").write_text(template("replica_group.sbatch"))
    array = {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"}
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    path = f"{folder}{os.pathsep}{clean['PATH']}"
    own = {"PATH": path, "CODE": str(code), "ROUND": "round" if met else ""}
    done = programs.run(
        ["bash", "script", *(words or ["job.toml"])],
        cwd=folder, env={**clean, **array, **own, **environment},
        timeout=60, check=False,
    )  # fmt: skip
    told = {
        name: (folder / name).read_text() if (folder / name).exists() else "" for name in ("again", "words")
    }
    return Ended(done.returncode, done.stdout + done.stderr, **told)


RULES = {
    "complete": ({"code": 0}, "complete"),
    "stopped": ({"code": 75}, "has left; back to the queue"),
    "killed after a round": ({"code": 137, "met": (0, 1)}, "was killed (exit code 137); back to the queue"),
    "killed after one alone": ({"code": 137, "met": (1,)}, "was killed (exit code 137); back to the queue"),
    "killed while others met": ({"code": 137, "met": (0, 2, 11)}, "before it had a part in a round: "),
    "killed at once": ({"code": 137}, "before it had a part in a round: "),
    "cut off": ({"code": 69, "met": (1, 2)}, "lost touch with the other groups; back to the queue"),
    "a mistake": ({"code": 1, "met": (0, 1)}, "failed with exit code 1: not restarted"),
    "cancelled": ({"code": 75, "TERM_TO_SHELL": "yes"}, "has left; ended by Slurm"),
    "too often": ({"code": 75, "SLURM_RESTART_COUNT": "20"}, "MAX_RESTARTS=20: not again"),
}


@pytest.mark.parametrize("name", RULES)
def test_after_the_training(name: str, tmp_path: Path) -> None:
    given, said = RULES[name]
    ended = run(tmp_path, **given)  # pyright: ignore[reportArgumentType]
    assert said in ended.said
    assert ended.code == given["code"]
    assert ended.again == ("requeue 7_1\n" if "back to the queue" in said else "")
    assert " --groups 2 --replica-group 1 " in ended.words


def test_slurm_brings_it_back_without_counting(tmp_path: Path) -> None:
    ended = run(tmp_path, code=0, SLURM_RESTART_COUNT="21")
    assert (ended.code, ended.words) == (1, "")
    assert "restarts: 21, MAX_RESTARTS=20: giving up" in ended.said


@pytest.mark.parametrize("words", [["--run.output_dir", "runs/mine"], ["--run.output_dir=runs/mine"]])
def test_the_run_folder_of_the_command_line_is_that_of_the_script(words: list[str], tmp_path: Path) -> None:
    assert " --run.output_dir runs/mine --groups 2" in run(tmp_path, "job.toml", *words, code=0).words
