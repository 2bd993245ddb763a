"""`hpcsgd job`: the script that it writes for its arguments, and its output. A script replaces Slurm here."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcsgd.cli import app, main
from train.launches import JOB, make_store

ON = "--nodes 2 --ranks-per-node 4"
METHODS = ("--methods", "bsp, sgp parallel.groups=4")
SBATCH = """\
#!/bin/sh
case "$*" in
*--test-only*) echo 'sbatch: Job 77 to start at noon' >&2 ;;
*) echo '77;here' ;;
esac
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_store(tmp_path / "small.h5")
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "site.toml").write_text('account = "us"\npartition = "short"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))  # without any scheduler in it
    return tmp_path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            f"train job.toml --parallel.groups 2 {ON} --resume --time 3:00 --account them",
            [
                "JOB=(job.toml --parallel.groups 2 --resume)",
                "#SBATCH --account=them",
                "#SBATCH --partition=short",
                "#SBATCH --time=3:00",
            ],
        ),
        (
            f"ensemble job.toml --method.name ensemble_sync --parallel.groups 4 {ON}",
            ["NUM_GROUPS=4", "#SBATCH --nodes=2"],
        ),
        ("ensemble job.toml --method.name ensemble_sync --parallel.groups 4 --independent", ["NUM_GROUPS=4"]),
        (f"probe job.toml {ON} --method.sync_every 4", ["JOB=(job.toml --method.sync_every 4)"]),
        (f"bench job.toml {ON} --parallel.groups 2", ["JOB=(job.toml --parallel.groups 2)"]),
        (f"measure job.toml {ON} --quick", ["JOB=(job.toml --quick)"]),
    ],
)
def test_the_script_of_a_job(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    words: str,
    said: list[str],
) -> None:
    app(["job", *words.split()])
    told = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    kind = "replica_group" if "--independent" in words else words.split(maxsplit=1)[0]
    assert told["script"] == f"runs/job-{kind}.sbatch"
    assert told["site"] == "site.toml"
    assert told["slurm"] == "not here: not asked whether it would take the job"
    assert told["submit"] == f"sbatch {told['script']}"
    lines = [line.partition(" #")[0].rstrip() for line in (folder / told["script"]).read_text().splitlines()]
    for line in said:
        assert lines.count(line) == 1, line


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ([], ""),
        (["--target", "0.5"], " --target 0.5"),
        (["--steps", "3", "--resume"], " --resume"),
    ],
)
def test_the_script_of_a_comparison(folder: Path, given: list[str], asked: str) -> None:
    app(["job", "compare", "job.toml", *ON.split(), *METHODS, *given])
    steps = " --training.steps 3" if "--steps" in given else ""
    text = (folder / "runs" / "job-compare.sbatch").read_text()
    assert f"\nJOB=(job.toml{steps} --methods 'bsp, sgp parallel.groups=4'{asked}) " in text
    assert "\nCOMMAND=compare " in text


def test_it_is_submitted_where_that_is_asked_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "sbatch").write_text(SBATCH)
    (folder / "sbatch").chmod(0o755)
    for submit, last in (
        ([], "submit    sbatch runs/job-train.sbatch"),
        (["--submit"], "submitted as job 77"),
    ):
        app(
            [
                "job",
                "train",
                "job.toml",
                "--parallel.groups",
                "2",
                *ON.split(),
                "--site",
                "site.toml",
                *submit,
            ]
        )
        *_, before, told = capsys.readouterr().out.splitlines()
        assert before == "slurm     Job 77 to start at noon"
        assert told == last


def test_a_mistake_leaves_nothing_to_submit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--parallel.groups", "3"], ["--time", "0"], ["--site", "nowhere.toml"]):
        with pytest.raises(SystemExit) as ended:
            main(["job", "train", "job.toml", *ON.split(), *words])
        assert ended.value.code == 1
        assert capsys.readouterr().err.count("\n") == 1
    assert not (folder / "runs").exists()
