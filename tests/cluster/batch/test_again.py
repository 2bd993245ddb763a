"""Tests of when the scripts train.pbs and train.flux submit themselves again, with stand-ins for commands."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import pytest

import programs
from hpcsgd.cluster.batch.scheduler import SCHEDULERS
from hpcsgd.cluster.batch.script import fill, template

PBS = SCHEDULERS["pbs"].directives

# A training that writes a checkpoint, or not, and ends with the given exit code.
RANKS = """#!/bin/sh
if [ "$1" = run ] || [ "${0##*/}" = mpiexec ]; then
  printf "%s\\n" "$*" > rank-words
  failure=${HPCSGD_FAILURE:-$(echo " $*" | sed 's/.*HPCSGD_FAILURE=\\([^ ]*\\).*/\\1/')}
  [ -z "$CHECKPOINT" ] || mkdir -p "runs/job/checkpoints/$CHECKPOINT"
  [ -z "$FAILURE" ] || echo "$FAILURE" >> "$failure"
  [ -z "$TERM_TO_SHELL" ] || kill -TERM $PPID
  exit $CODE
fi
case "$*" in
  "getattr jobid") echo f7 ;;
  "job id f7") echo 7 ;;
  *) [ -z "$REFUSED" ] || exit 1; printf "%s\\n" "$*" > again; echo "$HPCSGD_JOB" >> again; echo 8 ;;
esac
"""


class Ended(NamedTuple):
    code: int
    again: str
    """The arguments with which it was submitted again; empty if it was not."""
    said: str
    words: str
    """The command line of the ranks."""


def run(folder: Path, kind: str, text: str = "", **environment: str) -> Ended:
    for name in ("mpiexec", "qsub", "flux"):
        (folder / name).write_text(RANKS)
        (folder / name).chmod(0o755)
    (folder / "script").write_text(text or template(f"train.{kind}"))
    (folder / "runs" / "job" / "checkpoints" / "step-00000005").mkdir(parents=True, exist_ok=True)
    outside = ("PBS_", "FLUX_", "HPCSGD_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(outside)}
    path = f"{folder}{os.pathsep}{clean['PATH']}"
    own = {"PBS_JOBID": "7", "PBS_O_WORKDIR": str(folder), "HPCSGD_JOB": "job.toml"} if kind == "pbs" else {}
    words = [] if text or kind == "pbs" else ["job.toml"]
    done = programs.run(
        ["bash", "script", *words],
        cwd=folder, env={**clean, "PATH": path, "CODE": "0", **own, **environment},
        timeout=30, check=False,
    )  # fmt: skip
    logs = [path.read_text() for path in sorted((folder / "runs").glob("*.log"))]
    again, words_file = folder / "again", folder / "rank-words"
    return Ended(
        done.returncode,
        again.read_text() if again.exists() else "",
        "".join([*logs, done.stdout, done.stderr]),
        words_file.read_text() if words_file.exists() else "",
    )


PROGRESS = {"CHECKPOINT": "step-00000010"}
RULES = {
    "complete": ({"CODE": "0"}, 0, "complete"),
    "stopped ahead of the end": ({"CODE": "75"}, 75, "stopped with a checkpoint; goes on as job 8"),
    "a rank killed": (
        {"CODE": "137", **PROGRESS},
        137,
        "a rank was killed (exit code 137); goes on as job 8",
    ),
    "a rank killed at once": ({"CODE": "137"}, 137, "before it came to a new checkpoint: not restarted"),
    "ranks lost": ({"CODE": "69", **PROGRESS}, 69, "ranks lost touch with each other; goes on as job 8"),
    "a mistake": ({"CODE": "1", **PROGRESS}, 1, "failed with exit code 1: not restarted"),
    "a mistake that ended the others": (
        {"CODE": "137", "FAILURE": "hpcsgd: rank 2: no such key", **PROGRESS},
        1,
        "failed, not restarted: hpcsgd: rank 2: no such key",
    ),
    "interrupted by hand": ({"CODE": "130", **PROGRESS}, 130, "failed with exit code 130: not restarted"),
    "deleted": ({"CODE": "75", "TERM_TO_SHELL": "yes"}, 75, "stopped with a checkpoint; ended by"),
    "not taken again": ({"CODE": "75", "REFUSED": "yes"}, 75, "HPCSGD_FIRST_JOB=7"),
}


@pytest.mark.parametrize("kind", ["pbs", "flux"])
@pytest.mark.parametrize("name", RULES)
def test_after_the_training(name: str, kind: str, tmp_path: Path) -> None:
    environment, code, said = RULES[name]
    ended = run(tmp_path, kind, **environment)
    assert said in ended.said
    assert ended.code == code, ended.said
    assert bool(ended.again) == ("goes on as job 8" in said)
    assert ended.words


def test_hydra_says_9_for_a_rank_that_was_killed(tmp_path: Path) -> None:
    assert "a rank was killed (exit code 9); goes on" in run(tmp_path, "pbs", CODE="9", **PROGRESS).said


def test_it_is_submitted_again_after_itself(tmp_path: Path) -> None:
    asked, job = run(tmp_path, "pbs", CODE="75", HPCSGD_JOB="job.toml --training.epochs 3").again.splitlines()
    assert asked == "-W depend=afterany:7 -v HPCSGD_FIRST_JOB=7,HPCSGD_JOB jobs/train.pbs"
    assert job == "job.toml --training.epochs 3"


def test_the_command_to_type_where_a_node_may_not_submit(tmp_path: Path) -> None:
    options = "HPCSGD_FIRST_JOB=7,HPCSGD_JOB=job.toml --training.epochs 3"
    said = run(tmp_path, "pbs", CODE="75", REFUSED="yes", HPCSGD_JOB="job.toml --training.epochs 3").said
    assert said.endswith(f": qsub -v '{options}' jobs/train.pbs\n")
    text = fill(template("train.pbs"), {}, {"JOB": ["job.toml"]})
    said = run(tmp_path, "pbs", text, CODE="75", REFUSED="yes", HPCSGD_JOB="").said
    assert said.endswith(": qsub -v 'HPCSGD_FIRST_JOB=7' jobs/train.pbs\n")


@pytest.mark.parametrize(("walltime", "end"), [("1:00:00", 4600), ("26:08:09", 1000 + 94089), ("90", 1090)])
def test_ranks_that_cannot_ask_pbs_are_given_the_end(walltime: str, end: int, tmp_path: Path) -> None:
    (tmp_path / "date").write_text("#!/bin/sh\necho 1000\n")
    (tmp_path / "date").chmod(0o755)
    text = fill(template("train.pbs"), {"l walltime": walltime}, {"JOB": ["job.toml"]}, PBS)
    assert f" HPCSGD_PBS_END={end} " in run(tmp_path, "pbs", text).words


def test_flux_gets_it_again_from_inside(tmp_path: Path) -> None:
    (asked, _) = run(tmp_path, "flux", CODE="75").again.splitlines()
    options = "--dependency=afterany:7 --env=HPCSGD_FIRST_JOB=7"
    assert asked == f"--parent batch {options} jobs/train.flux job.toml"


@pytest.mark.parametrize("kind", ["pbs", "flux"])
@pytest.mark.parametrize(
    "words", [["--run.output_dir", "runs/mine"], ["--seed", "2", "--run.output_dir=runs/mine"]]
)
def test_the_run_folder_of_the_command_line_is_that_of_the_script(
    kind: str, words: list[str], tmp_path: Path
) -> None:
    ended = run(tmp_path, kind, fill(template(f"train.{kind}"), {}, {"JOB": ["job.toml", *words]}))
    assert ended.words.rstrip().endswith("--run.output_dir runs/mine")
    assert "run folder runs/mine" in ended.said


@pytest.mark.parametrize("kind", ["pbs", "flux"])
def test_starts_are_counted_in_a_file(kind: str, tmp_path: Path) -> None:
    """Starts that PBS makes by itself, under the same number, count as well."""
    text = template(f"train.{kind}").replace("MAX_RESTARTS=20", "MAX_RESTARTS=1")
    text = fill(text, {}, {"JOB": ["job.toml"]})
    assert "--resume" not in run(tmp_path, kind, text, CODE="75").words
    ended = run(tmp_path, kind, text, CODE="75")
    assert ended.words.endswith("--run.output_dir runs/job --resume\n")
    assert "restarts: 1, MAX_RESTARTS=1: not again" in ended.said
    assert ended.said.count("start 2, job 7: 4 ranks") == 1


def test_pbs_does_not_count_them(tmp_path: Path) -> None:
    once = template("train.pbs").replace("MAX_RESTARTS=20", "MAX_RESTARTS=0")
    text = fill(once, {}, {"JOB": ["job.toml"]})
    run(tmp_path, "pbs", text)
    (tmp_path / "rank-words").unlink()
    ended = run(tmp_path, "pbs", text)
    assert "restarts: 1, MAX_RESTARTS=0: giving up" in ended.said
    assert ended.words == ""


def test_ranks_have_the_variables_wherever_they_are(tmp_path: Path) -> None:
    """The variables are words of the command, because not every mpiexec passes the environment on."""
    values = {
        "JOB": ["my job.toml"],
        "ENVIRONMENT": ["A=b c"],
        "CORES": "6",
        "MPIEXEC": ["mpiexec", "--ppn", "2"],
    }
    words = run(tmp_path, "pbs", fill(template("train.pbs"), {}, values)).words
    assert words.startswith(
        "--ppn 2 -n 4 env A=b c OMP_NUM_THREADS=6 HPCSGD_FAILURE=runs/my job-7-0.failure HPCSGD_PBS_END="
    )
    assert words.endswith("python -m hpcsgd train my job.toml --run.output_dir runs/my job\n")


def test_flux_is_given_the_size(tmp_path: Path) -> None:
    values = {"JOB": ["job.toml"], "NODES": "2", "RANKS": "8", "CORES": "3", "FLUX_RUN": ["-o", "pmi=pmix"]}
    words = run(tmp_path, "flux", fill(template("train.flux"), {}, values)).words
    assert words.startswith("run --nodes=2 --ntasks=8 --cores-per-task=3 ")
    assert " -o pmi=pmix python -m hpcsgd train job.toml " in words


@pytest.mark.parametrize("kind", ["pbs", "flux"])
def test_a_job_file_is_needed(kind: str, tmp_path: Path) -> None:
    text = fill(template(f"train.{kind}"), {}, {"JOB": []})
    ended = run(tmp_path, kind, text, HPCSGD_JOB="")
    assert ended.code != 0
    assert "usage: " in ended.said
