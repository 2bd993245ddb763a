"""Unknown flags and keys are reported before anything is loaded, with what may have been meant."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import programs
from cli.test_cli import JOB
from hpcsgd.cli import main
from hpcsgd.config.keys import is_known, keys, meant
from hpcsgd.config.schema import Config

RANKS = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
"""The variables of a launcher for ranks that are all on one node."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "job.toml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def told(capfd: pytest.CaptureFixture[str], words: list[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 1
    err = capfd.readouterr().err
    assert err.count("\n") <= 1
    return err


MISTYPED = {
    "train job.toml --resum": "--resum: hpcsgd train has no such option: did you mean --resume? Allowed: "
    "--probe, --resume, --trace, and keys of the file, as --parallel.groups, in data, "
    "lr_schedule, method, model, ",
    "train --resum job.toml": "--resum job.toml: hpcsgd train has no such option: did you mean --resume? ",
    "measure --quik": "--quik: hpcsgd measure has no such option: did you mean --quick? ",
    "measure job.toml --quik": "--quik: hpcsgd measure has no such option: did you mean --quick? ",
    "train job.toml --group 2": "--group 2: hpcsgd train has no such option: did you mean "
    "--parallel.groups? ",
    "launch job.toml --group 2": "--group 2: hpcsgd launch has no such option: did you mean --groups or "
    "--parallel.groups? ",
    "doctor --group 2": "--group 2: hpcsgd doctor has no such option: did you mean --groups? Allowed: "
    "--data-file, --group-size, --groups\n",
    "plan job.toml --machin x": "--machin x: hpcsgd plan has no such option: did you mean --machine or ",
    "train job.toml --epochs 3": "--epochs 3: hpcsgd train has no such option: did you mean "
    "--training.epochs? ",
    "train job.toml --training.lr 1": "--training.lr 1: unknown key: did you mean --optimizer.lr? ",
    "train job.toml --parallel.group-size 2": "--parallel.group-size 2: unknown key: "
    "did you mean --parallel.group_size? Allowed: --parallel.backend, --parallel.device_backend, "
    "--parallel.fsdp, --parallel.group_size, --parallel.groups, --parallel.timeout_s\n",
    "train job.toml --trainin.epochs=2": "--trainin.epochs 2: unknown key: did you mean --training.epochs? ",
    "train job.toml --method": "--method: expected a value after it; did you mean --method.name?\n",
    "compare job.toml --method": "--method: expected a value after it; did you mean --methods or "
    "--method.name?\n",
    "train job.toml --seed --resume": "--seed: expected a value after it\n",
    "train job.toml resume": "resume: expected a flag here: did you mean --resume? ",
    "train job.toml -resume": "-resume: expected a flag here: did you mean --resume? ",
    "train --training.epochs 3 job.toml": "--training.epochs 3: a key of the file: name the file before it\n",
    "job train job.toml --node 2": "--node 2: hpcsgd job train has no such option: did you mean --nodes? ",
    "simulate job.toml --pictur x.png": "--pictur x.png: hpcsgd simulate has no such option: did you mean "
    "--picture? ",
    "simulate job.toml --groups 3": "--groups 3: hpcsgd simulate has no such option: did you mean "
    "--job.groups? ",
    "launch job.toml --groups 2.6": "--groups 2.6: expected a whole number\n",
    "job train job.toml --nodes=0.5": "--nodes 0.5: expected a whole number\n",
    "data convert images a b --size inf": "--size inf: expected a whole number\n",
    "compare job.toml --methods bsp --target nan": "--target nan: expected a number\n",
    "init --epoch 3": "--epoch 3: hpcsgd init has no such option: did you mean --epochs? Allowed: --data, ",
    "data convert text a b --tokenize bytes": "--tokenize bytes: hpcsgd data convert text has no such ",
    "probe job.toml --seeds 2": "--seeds 2: hpcsgd probe has no such option: did you mean --seed? Allowed: "
    "--delta, --groups, --offload-dir, --ranks, --repeats, --steps, and keys of the file, ",
}


@pytest.mark.parametrize(("words", "line"), MISTYPED.items(), ids=list(MISTYPED))
def test_a_mistyped_flag_is_reported_with_what_was_meant(
    capfd: pytest.CaptureFixture[str], words: str, line: str
) -> None:
    assert told(capfd, words.split()).startswith(f"hpcsgd: {line}")


def test_a_value_that_a_key_cannot_have_was_not_meant_for_it() -> None:
    known = keys(Config)
    assert meant("group", "2", [], known) == ["--parallel.groups"]
    intra, inter = "--parallel.device_backend.intra_group", "--parallel.device_backend.inter_group"
    assert meant("group", "nccl", [], known) == [intra, inter]
    assert meant("group", None, [], known) == [intra, "--parallel.groups", inter]
    assert meant("mod", "{}", [], known)[0] == "--model"


def test_tables_of_somebody_elses_keys_take_any() -> None:
    free = (
        "method.evry",
        "model.arguments.deep.est",
        "data.partition.name",
        "training",
        "parallel.device_backend.intra_group",
    )
    assert all(is_known(path, Config) for path in free)
    unknown = (
        "evry",
        "parallel.grops",
        "parallel.device_backend.intra_grop",
        "training.epochs.many",
        "model.depth",
    )
    assert not any(is_known(path, Config) for path in unknown)


def test_a_long_value_is_shortened_with_how_much_was_left_out(capfd: pytest.CaptureFixture[str]) -> None:
    line = told(capfd, ["train", "job.toml", "--training.epochs", "x" * 5000])
    assert line == (
        f"hpcsgd: --training.epochs {'x' * 100}…(4,800 characters left out)…{'x' * 100}: expected int ≥ 1\n"
    )
    Path("job.toml").write_text(JOB.replace("epochs = 3", f'epochs = "{"3 " * 2500}"'))
    line = told(capfd, ["train", "job.toml"])
    assert line.startswith('hpcsgd: job.toml:12: [training] epochs = "3 3 3')
    assert "…(4,802 characters left out)…" in line
    assert line.endswith('3 3 3 ": expected int ≥ 1\n')
    assert len(line) < 400
    assert len(told(capfd, ["x" * 5000])) < 500
    assert len(told(capfd, ["compare", "job.toml", "--methods", "bsp x, " * 1000])) < 2100


def test_rank_0_alone_tells_and_all_end(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The line is also in the file that a batch script reads."""
    monkeypatch.setenv("HPCSGD_FAILURE", str(tmp_path / "failure"))
    for name, value in RANKS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    assert told(capfd, ["train", "job.toml", "--resum"]) == told(capfd, ["train", "nowhere.toml"]) == ""
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    line = told(capfd, ["train", "nowhere.toml"])
    assert line == "hpcsgd: nowhere.toml: cannot be read: No such file or directory\n"
    assert (tmp_path / "failure").read_text() == line


def ended_early(words: list[str], environment: dict[str, str]) -> programs.Done:
    """Run a command that must end before it imports MPI and torch, which are missing here."""
    script = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['mpi4py'] = None\n"
        "from hpcsgd.cli import main\n"
        f"main({words!r})"
    )
    done = programs.run([sys.executable, "-c", script], env={**os.environ, **environment}, check=False)
    assert done.returncode == 1
    return done


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("train job.toml --resum", "--resum: hpcsgd train has no such option: did you mean --resume? "),
        ("train", 'Command "train" parameter JOB requires an argument.'),
        ("train bad.toml", "bad.toml:12: [training] epoch = 3: unknown key: did you mean 'epochs'? "),
        ("probe bad.toml", "bad.toml:12: [training] epoch = 3: unknown key: did you mean 'epochs'? "),
        ("measure bad.toml", "bad.toml:12: [training] epoch = 3: unknown key: did you mean 'epochs'? "),
        ("compare bad.toml --methods bsp", "variant 'bsp': bad.toml: [training] epoch = 3: unknown key: "),
        ("train job.toml --training.epochs 0", "--training.epochs 0: expected int ≥ 1"),
    ],
)
def test_mistakes_are_reported_before_torch_and_mpi_are_loaded(words: str, line: str) -> None:
    Path("bad.toml").write_text(JOB.replace("epochs", "epoch"))
    done = ended_early(words.split(), {**RANKS, "OMPI_COMM_WORLD_RANK": "0"})
    assert done.stderr.startswith(f"hpcsgd: {line}")
    assert done.stderr.count("\n") == 1


def test_ranks_of_several_nodes_may_see_unlike_files_and_agree_by_mpi() -> None:
    """If one rank ended alone, the others would wait for it forever."""
    several = {**RANKS, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    assert "torch" in ended_early(["train", "nowhere.toml"], several).stderr
    assert "--resum: hpcsgd" in ended_early(["train", "nowhere.toml", "--resum"], several).stderr
