"""Tests that the job file of `hpcsgd init` can be trained as it is, and that existing files stay."""

from __future__ import annotations

import os
import pty
import re
import shutil
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

import programs
from data.pictures import write_classes, write_pngs
from hpcsgd import models
from hpcsgd.cluster.batch import load_site, site
from hpcsgd.cluster.starting import begin, run
from hpcsgd.cluster.starting.choices import COLLECTIONS, FORMS, METHODS, data_of_file
from hpcsgd.cluster.starting.site import site_text
from hpcsgd.config.schema import load
from hpcsgd.data import READERS, convert_images, convert_npz, convert_pairs, convert_text
from hpcsgd.data.layout import VERSIONS
from hpcsgd.errors import UserError
from hpcsgd.files.atomic import new_file
from hpcsgd.train.parts import make_method
from train.launches import launch, make_store

CHOICES = [(data, model) for data, kind in COLLECTIONS.items() for model in kind.kind.models]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set up a folder without a cluster; a test may add one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "is_cluster", lambda: False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_there_is_every_collection() -> None:
    assert {*COLLECTIONS} == {*READERS, "text"}


@pytest.mark.parametrize(("data", "model"), CHOICES, ids=lambda choice: choice)
def test_every_choice_is_a_job_file(data: str, model: str) -> None:
    begin(Path("job.toml"), data=data, model=model, ranks=6, groups=2)
    config = load(Path("job.toml"))
    assert config.model.name == model
    assert (config.parallel.groups, config.data.path.name) == (2, f"{data}.h5")
    assert config.data.group_batch_size % 3 == 0
    models.build(config.model.name, config.model.arguments)


def test_the_sizes_of_texts_are_those_of_their_dataset_file(folder: Path) -> None:
    """The file of a text is made later, by the command that `begin` prints."""
    (folder / "words.txt").write_text("some words\n" * 40)
    words = [folder / "words.txt"]
    convert_text(words, folder / "made.h5", "bytes", test=words)
    assert data_of_file(folder / "made.h5").sizes == COLLECTIONS["text"].sizes


@pytest.mark.parametrize("method", METHODS)
def test_every_method_can_be_made(method: str) -> None:
    begin(Path("job.toml"), data="digits", method=method)
    make_method(load(Path("job.toml")).method, 10)


@pytest.mark.slow
def test_it_is_trained_on_two_ranks(folder: Path) -> None:
    """The arguments come from the dataset file: images of 6 x 6 pixels."""
    programs.mpiexec()
    make_store(folder / "small.h5", 96)
    words = ["--data", "small.h5", "--ranks", "2", "--epochs", "1"]
    done = launch(folder, "init", *words)
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[0] == "written   job.toml"
    assert done.out.splitlines()[-1] == "next      mpiexec -n 2 hpcsgd train job.toml"
    assert load(Path("job.toml")).model.arguments == {"shape": [1, 6, 6], "classes": 10}
    done = launch(folder, "train", "job.toml", n=2)
    assert (done.code, done.err) == (0, "")
    assert (folder / "runs" / "job" / "model.pt").exists()


STORES = {
    "arrays": ({"inputs": 6, "classes": 3}, "mlp"),
    "image files": ({"classes": 2}, "resnet50"),
    "pairs": ({"scale": 2}, "edsr"),
}


def make_store_of(form: str, folder: Path) -> Path:
    store = folder / "own.h5"
    if form == "arrays":
        np.savez(folder / "own.npz", x=np.ones((40, 2, 3)), y=np.arange(40) % 3)
        convert_npz([folder / "own.npz"], store)
    elif form == "image files":
        convert_images(write_classes(folder / "images"), store, 16)
    else:
        convert_pairs(write_pngs(folder / "images"), store, 2)
    return store


@pytest.mark.parametrize("form", STORES)
def test_a_store_of_ones_own_gives_its_sizes(folder: Path, form: str) -> None:
    sizes, model = STORES[form]
    begin(Path("job.toml"), data=str(make_store_of(form, folder).relative_to(folder)))
    config = load(Path("job.toml"))
    assert (config.model.name, config.model.arguments) == (model, sizes)
    models.build(model, sizes)


def test_a_model_of_ones_own_is_given_the_sizes_of_the_samples(folder: Path) -> None:
    begin(Path("job.toml"), data=str(make_store_of("arrays", folder)), model="mine:small")
    lines = Path("job.toml").read_text().splitlines()
    at = lines.index("[model.arguments]")
    assert lines[at + 1 : at + 5] == [
        "# of your function, by name; the samples have:",
        "# shape = [2, 3]",
        "# inputs = 6",
        "# classes = 3",
    ]
    assert load(Path("job.toml")).model.arguments == {}


def test_every_form_of_store_can_be_begun_with() -> None:
    assert {*FORMS} == {*VERSIONS}


def test_every_line_but_the_plain_ones_is_explained() -> None:
    begin(Path("job.toml"), data="cifar10")
    lines = Path("job.toml").read_text().splitlines()
    assert sum("#" in line for line in lines) > 15
    assert max(map(len, lines)) <= 110


def test_what_is_there_stays(folder: Path) -> None:
    Path("job.toml").write_text("mine")
    with pytest.raises(UserError, match=r"^job.toml: is there already, and stays as it is"):
        begin(Path("job.toml"), data="digits")
    assert Path("job.toml").read_text() == "mine"


def test_what_comes_meanwhile_stays_too(folder: Path) -> None:
    def comes(_: str) -> str:
        Path("job.toml").write_text("mine")
        return ""

    with pytest.raises(UserError, match="is there already"):
        begin(Path("job.toml"), data="digits", ask=comes)
    assert Path("job.toml").read_text() == "mine"
    assert [path.name for path in folder.iterdir()] == ["job.toml"]


def test_half_a_file_is_none(folder: Path) -> None:
    with pytest.raises(KeyError), new_file(folder / "x") as part:
        part.write_text("half")
        raise KeyError
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"data": "digts"}, "--data digts: did you mean 'digits'?"),
        ({}, "--data is missing. Allowed: digits, "),
        ({"data": "none.h5"}, "none.h5: no such file"),
        ({"data": "digits", "model": "gpt"}, "--model gpt: Allowed: cnn, mlp, resnet110"),
        ({"data": "text", "model": "lstn"}, "--model lstn: did you mean 'lstm'?"),
        ({"data": "digits", "method": "spg"}, "--method spg: did you mean 'sgp'?"),
        ({"data": "digits", "groups": 3}, "--groups 3: does not divide 4 ranks; allowed: 1, 2, 4"),
        ({"data": "digits", "ranks": 0}, "--ranks 0: at least 1 is needed"),
        ({"data": "digits", "epochs": -1}, "--epochs -1: at least 1 is needed"),
    ],
)
def test_what_cannot_be_is_one_line(folder: Path, words: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=f"^{re.escape(message)}") as caught:
        begin(Path("job.toml"), **words)  # pyright: ignore[reportArgumentType]
    assert "\n" not in str(caught.value)
    assert list(folder.iterdir()) == []


def test_a_folder_that_is_not_there() -> None:
    with pytest.raises(UserError, match=r"^no/job.toml: there is no folder no$"):
        begin(Path("no/job.toml"), data="digits")


def test_a_mistake_in_an_answer_is_told_before_the_question_is_repeated(folder: Path) -> None:
    answers = iter(["digts", "", "digits", "mpl", "mlp", "many", "0", "6", "4", "3", ""])
    asked: list[str] = []

    def ask(question: str) -> str:
        asked.append(question)
        return next(answers)

    begin(Path("job.toml"), ask=ask)
    wrong = [question.split("\n")[0] for question in asked if "\n" in question]
    told = [
        "--data digts: did you mean 'digits'? ", "--data is missing. Allowed: digits, ",
        "--model mpl: did you mean 'mlp'? ", "many: expected a whole number",
        "--ranks 0: at least 1 is needed", "--groups 4: does not divide 6 ranks; allowed: 1, 2, 3, 6",
    ]  # fmt: skip
    assert len(wrong) == len(told)
    assert all(line.startswith(beginning) for line, beginning in zip(wrong, told, strict=True))
    config = load(Path("job.toml"))
    assert (config.model.name, config.parallel.groups, config.method.name) == ("mlp", 3, "hierarchical")


def test_an_answer_may_be_what_a_flag_may_be(folder: Path) -> None:
    (folder / "small.py").write_text("def made(): ...")
    answers = iter(["digits", "small:made", "2", "", ""])
    lines = begin(Path("job.toml"), ask=lambda _: next(answers))
    assert load(Path("job.toml")).model.name == "small:made"
    assert "next      write the arguments of small:made into [model.arguments] of job.toml" in lines


@pytest.mark.slow
def test_in_a_terminal_it_asks(folder: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "hpcsgd", "init", "--data", "digits", "--method", "bsp"]
    process = programs.start(command, cwd=folder, stdin=theirs)
    os.close(theirs)
    os.write(ours, b"mlp\n2\n1\n")
    done = programs.finish(process)
    os.close(ours)
    assert done.returncode == 0, done
    assert "model (cnn, mlp, " in done.stdout
    assert load(Path("job.toml")).model.name == "mlp"
    assert load(Path("job.toml")).parallel.groups == 1


def commands(folder: Path, **scripts: str) -> str:
    """Write stand-ins for Slurm's commands that print these texts, and return a PATH with them."""
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    for name, text in scripts.items():
        (bin_folder / name).write_text(f"#!/bin/sh\ncat <<'E'\n{text}\nE\n")
        (bin_folder / name).chmod(0o755)
    return os.pathsep.join([str(bin_folder), "/usr/bin", "/bin"])


def test_in_a_cluster_there_is_a_site_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = commands(folder, sbatch="", sinfo="debug\nlong*\n", srun="MPI plugin types are...\n\tpmix\n\tnone")
    monkeypatch.setenv("PATH", path)
    monkeypatch.setenv("LOADEDMODULES", "gcc/13:openmpi/5")
    monkeypatch.setattr(run, "is_cluster", lambda: shutil.which("sbatch") is not None)
    begin(Path("job.toml"), data="digits")
    found, source = load_site(None)
    assert source == Path("site.toml")
    assert (found.partition, found.mpi, found.modules) == ("long", "pmix", ("gcc/13", "openmpi/5"))
    Path("site.toml").write_text('partition = "mine"\n')
    told = begin(Path("other.toml"), data="digits")
    assert "site      site.toml stays as it is" in told
    assert Path("site.toml").read_text() == 'partition = "mine"\n'


def test_a_slurm_that_says_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(folder))
    Path("site.toml").write_text(site_text({}))
    assert set(tomllib.loads(site_text({}))) == {"mpi"}
    assert load_site(None)[0].mpi in ("pmi2", "pmix")
    assert site_text({"CRAYPE_VERSION": "2"}).count('mpi = "cray_shasta"') == 0  # srun does not offer it


def test_it_looks_where_batch_jobs_do() -> None:
    assert [place.expanduser() / "site.toml" for place in site.PLACES] == [p.expanduser() for p in run.SITES]
