"""Tests of when train.sbatch is requeued: the script itself, with stand-ins for srun and scontrol."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import pytest

import programs
from hpcsgd.cluster.batch.script import fill, template

# A training that writes a checkpoint, or not, and ends with the given exit code.
SRUN = """#!/bin/sh
echo "$@" > srun-words
echo "threads $OMP_NUM_THREADS"
[ -z "$CHECKPOINT" ] || mkdir -p "${FOLDER:-runs/job}/checkpoints/$CHECKPOINT"
[ -z "$FAILURE" ] || echo "$FAILURE" >> "$HPCSGD_FAILURE"
[ -z "$TERM_TO_SHELL" ] || kill -TERM $PPID
exit $CODE
"""
SCONTROL = """#!/bin/sh
echo "$@" > requeued
kill -KILL $PPID  # as Slurm ends the shell
"""
KILLED = -9


class Ended(NamedTuple):
    code: int
    requeued: bool
    said: str
    words: str
    """The arguments of srun."""


def run(folder: Path, text: str = "", *words: str, **environment: str) -> Ended:
    for name, program in (("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / name).write_text(program)
        (folder / name).chmod(0o755)
    (folder / "train.sbatch").write_text(text or template("train.sbatch"))
    old = folder / "runs" / "job" / "checkpoints" / "step-00000005"
    old.mkdir(parents=True)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    done = programs.run(
        ["bash", "train.sbatch", *words],
        cwd=folder,
        env={**clean, "PATH": f"{folder}:{clean['PATH']}", "SLURM_JOB_ID": "7", "CODE": "0", **environment},
        timeout=30, check=False,
    )  # fmt: skip
    called = folder / "srun-words"
    return Ended(
        done.returncode,
        (folder / "requeued").exists(),
        done.stdout + done.stderr,
        called.read_text() if called.exists() else "",
    )


PROGRESS = {"CHECKPOINT": "step-00000010"}
RULES = {
    "complete": ({"CODE": "0"}, 0, "complete"),
    "stopped ahead of the end": ({"CODE": "75"}, KILLED, "stopped with a checkpoint; back to the queue"),
    "a rank killed": ({"CODE": "137", **PROGRESS}, KILLED, "a rank was killed (exit code 137); back"),
    "a rank killed at once": ({"CODE": "137"}, 137, "before it came to a new checkpoint: not restarted"),
    "a segmentation fault": ({"CODE": "139", **PROGRESS}, KILLED, "a rank was killed (exit code 139)"),
    "ranks lost": ({"CODE": "69", **PROGRESS}, KILLED, "ranks lost touch with each other; back"),
    "ranks lost at once": ({"CODE": "69"}, 69, "not restarted"),
    "a mistake": ({"CODE": "1", **PROGRESS}, 1, "failed with exit code 1: not restarted"),
    "a mistake that ended the others": (
        {"CODE": "137", "FAILURE": "hpcsgd: rank 2: no such key", **PROGRESS},
        1,
        "failed, not restarted: hpcsgd: rank 2: no such key",
    ),
    "interrupted by hand": ({"CODE": "130", **PROGRESS}, 130, "failed with exit code 130: not restarted"),
    "cancelled": ({"CODE": "75", "TERM_TO_SHELL": "yes"}, 75, "stopped with a checkpoint; ended by Slurm"),
    "a rank killed by Slurm": ({"CODE": "143", **PROGRESS, "TERM_TO_SHELL": "yes"}, 143, "ended by Slurm"),
    "the last time": ({"CODE": "75", "SLURM_RESTART_COUNT": "19"}, KILLED, "back to the queue"),
    "often enough": ({"CODE": "75", "SLURM_RESTART_COUNT": "20"}, 75, "restarts: 20, MAX_RESTARTS=20"),
    "brought back too often": (
        {"SLURM_RESTART_COUNT": "21"},
        1,
        "restarts: 21, MAX_RESTARTS=20: giving",
    ),
}


@pytest.mark.parametrize(
    "words", [("--run.output_dir", "runs/mine"), ("--seed", "2", "--run.output_dir=runs/mine")]
)
def test_the_run_folder_of_the_command_line_is_that_of_the_script(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    ended = run(tmp_path, "", "job.toml", *words, CODE="137", FOLDER="runs/mine", **PROGRESS)
    assert ended.words.rstrip().endswith("--run.output_dir runs/mine")
    assert "run folder runs/mine" in ended.said
    assert ended.requeued, "its new checkpoint was not seen"


@pytest.mark.parametrize("name", RULES)
def test_after_the_training(name: str, tmp_path: Path) -> None:
    environment, code, said = RULES[name]
    ended = run(tmp_path, "", "job.toml", **environment)
    assert said in ended.said
    assert ended.code == code, ended.said
    assert ended.requeued == (code == KILLED)
    assert (ended.words == "") == (name == "brought back too often")


def test_the_first_start_does_not_resume(tmp_path: Path) -> None:
    ended = run(tmp_path, "", "job.toml", "--training.epochs", "3", SLURM_CPUS_PER_TASK="6")
    assert ended.words.endswith("hpcsgd train job.toml --training.epochs 3 --run.output_dir runs/job\n")
    assert "threads 6\n" in ended.said


def test_restarts_resume(tmp_path: Path) -> None:
    assert run(tmp_path, "", "job.toml", SLURM_RESTART_COUNT="1").words.endswith("runs/job --resume\n")


def test_a_comparison_goes_on_by_the_same_rules(tmp_path: Path) -> None:
    """A comparison is requeued if one of its variants has written a new checkpoint."""
    values = {"COMMAND": "compare", "JOB": ["job.toml", "--methods", "bsp, sgp"]}
    text = fill(template("train.sbatch"), {}, values)
    ended = run(tmp_path, text, CODE="137", FOLDER="runs/job-compare/bsp", **PROGRESS)
    assert "a rank was killed (exit code 137); back" in ended.said
    assert "hpcsgd compare job.toml --methods bsp, sgp --run.output_dir runs/job\n" in ended.words


def test_a_job_file_is_needed(tmp_path: Path) -> None:
    ended = run(tmp_path)
    assert ended.code != 0
    assert "usage: sbatch train.sbatch job.toml" in ended.said


def test_values_with_spaces_arrive(tmp_path: Path) -> None:
    values = {
        "JOB": ["my job.toml", "--model.name", "a'b"],
        "SETUP": str(tmp_path / "set up.sh"),
        "SRUN": ["--constraint=a&b"],
        "RUN": "runs/my job",
    }
    (tmp_path / "set up.sh").write_text("echo setting up\n")
    ended = run(tmp_path, fill(template("train.sbatch"), {}, values))
    assert "setting up" in ended.said
    assert (
        "--constraint=a&b python -m hpcsgd train my job.toml --model.name a'b --run.output_dir" in ended.words
    )
    assert ended.words.endswith("runs/my job\n")


def test_ranks_are_bound_as_the_site_has_it(tmp_path: Path) -> None:
    values = {
        "JOB": ["job.toml"],
        "BIND": ["--cpu-bind=map_ldom:1,0", "--gpu-bind=none"],
        "SRUN": ["--exact"],
    }
    bound = run(tmp_path, fill(template("train.sbatch"), {}, values)).words
    assert " --cpu-bind=map_ldom:1,0 --gpu-bind=none --exact python -m hpcsgd train" in bound


def test_cores_are_bound_where_no_site_says_more(tmp_path: Path) -> None:
    assert " --cpu-bind=cores python -m hpcsgd train" in run(tmp_path, "", "job.toml").words


def test_ranks_have_the_variables_of_the_site(tmp_path: Path) -> None:
    """The stand-in for srun reads its behavior from these variables."""
    values = {"JOB": ["job.toml"], "ENVIRONMENT": ["CODE=3", "FAILURE=two words"]}
    assert (
        "failed, not restarted: two words" in run(tmp_path, fill(template("train.sbatch"), {}, values)).said
    )


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"SETUP": "missing.sh"}, "cannot source missing.sh"),
        ({"MODULES": ["no-such-mpi"]}, "cannot load no-such-mpi"),
    ],
)
def test_a_setup_that_fails(value: dict[str, str], said: str, tmp_path: Path) -> None:
    ended = run(tmp_path, fill(template("train.sbatch"), {}, {"JOB": ["job.toml"], **value}))
    assert said in ended.said
    assert (ended.code, ended.words) == (1, "")
