"""Tests of the options that each scheduler is given, and of how the scheduler is detected."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import programs
from hpcsgd.cluster.batch import (
    Allocation,
    BatchJob,
    Site,
    by_hand,
    check_training,
    estimate,
    prepare,
    submit,
)
from hpcsgd.cluster.batch.scheduler import SCHEDULERS, scheduler_of
from hpcsgd.cluster.batch.script import fill, template
from hpcsgd.errors import UserError
from train.launches import JOB, make_store

EIGHT = Allocation(nodes=2, ranks_per_node=4, cpus_per_rank=3, time="1-2:03:04")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_store(tmp_path / "small.h5")
    (tmp_path / "job.toml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make(allocation: Allocation = EIGHT, after: str | None = None, **site: Any) -> BatchJob:
    checked = check_training(Path("job.toml"), (), allocation)
    return prepare("train", ["job.toml", "--parallel.groups", "2"], checked, allocation, Site(**site), after)


def lines(order: BatchJob) -> list[str]:
    programs.run(["bash", "-n", order.script])
    return order.script.read_text().splitlines()


@pytest.mark.usefixtures("folder")
def test_the_words_of_pbs() -> None:
    site = {"partition": "long", "account": "us", "qsub": ("-l filesystems=home", "-l place=excl", "-m n")}
    mpiexec = ("mpiexec", "--ppn", "{ranks_per_node}", "--depth={cpus_per_rank}")
    order = make(after="7.pbs", scheduler="pbs", mpiexec=mpiexec, environment={"A": "b c"}, **site)
    assert order.script == Path("runs/job-train.pbs")
    said = lines(order)
    for line in (
        "#PBS -N job-train",
        "#PBS -l select=2:ncpus=12:mpiprocs=4:ompthreads=3",
        "#PBS -l walltime=26:03:04",
        "#PBS -l place=excl",
        "#PBS -l filesystems=home",
        "#PBS -q long",
        "#PBS -A us",
        "#PBS -m n",
        "#PBS -W depend=afterok:7.pbs",
        "#PBS -o runs/job-train.out",
        "#PBS -r y",
    ):
        assert said.count(line) == 1, line
    values = [line.partition(" #")[0].rstrip() for line in said]
    for value in (
        "JOB=(job.toml --parallel.groups 2)",
        "SCRIPT=runs/job-train.pbs",
        "RANKS=8",
        "CORES=3",
        "MPIEXEC=(mpiexec --ppn 4 --depth=3)",
        "ENVIRONMENT=('A=b c')",
        "RUN=runs/job",
    ):
        assert value in values, value


@pytest.mark.usefixtures("folder")
def test_the_words_of_flux() -> None:
    site = {
        "partition": "long",
        "account": "us",
        "flux_batch": ("--exclusive", "-t 5m"),
        "flux_run": ("-o", "pmi=pmix"),
    }
    order = make(after="f7", scheduler="flux", **site)
    assert order.script == Path("runs/job-train.flux")
    said = lines(order)
    for line in (
        "# flux: --job-name=job-train",
        f"# flux: --cwd={shlex.quote(str(Path.cwd()))}",
        "# flux: --nodes=2",
        "# flux: --nslots=8",
        "# flux: --cores-per-slot=3",
        "# flux: --time-limit=93784s",
        "# flux: --queue=long",
        "# flux: --bank=us",
        "# flux: --dependency=afterok:f7",
        "# flux: --exclusive",
        "# flux: -t 5m",
    ):
        assert said.count(line) == 1, line
    values = [line.partition(" #")[0].rstrip() for line in said]
    for value in ("SCRIPT=runs/job-train.flux", "NODES=2", "RANKS=8", "CORES=3", "FLUX_RUN=(-o pmi=pmix)"):
        assert value in values, value


def test_directives_of_flux_stand_together(folder: Path) -> None:
    """Flux refuses a directive after a line that does not begin like one."""
    said = lines(make(scheduler="flux", partition="long"))
    numbers = [number for number, line in enumerate(said) if line.startswith("# flux: ")]
    between = said[numbers[0] : numbers[-1] + 1]
    assert len(numbers) > 5
    assert all(line.startswith("# ") or not line for line in between)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("gpus", "pbs", "flux"),
    [
        ({"gpus_per_node": 4}, "ngpus=4", "--gpus-per-slot=1"),
        ({"gpus_per_rank": 2}, "ngpus=8", "--gpus-per-slot=2"),
    ],
)
def test_gpus(gpus: dict[str, Any], pbs: str, flux: str) -> None:
    allocation = Allocation(nodes=2, ranks_per_node=4, **gpus)
    assert any(line.endswith(f":{pbs}") for line in lines(make(allocation, scheduler="pbs")))
    said = lines(make(allocation, scheduler="flux"))
    assert f"# flux: {flux}" in said
    assert any(line.startswith(f"FLUX_RUN=({flux.replace('slot', 'task')})") for line in said)


@pytest.mark.usefixtures("folder")
def test_gpus_that_flux_cannot_divide() -> None:
    with pytest.raises(UserError, match="--gpus-per-node 3: Flux gives each rank as many"):
        make(Allocation(ranks_per_node=4, gpus_per_node=3), scheduler="flux")


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("word", ["{ranks}", "{", "{0}"])
def test_a_number_that_there_is_not(word: str) -> None:
    with pytest.raises(UserError, match="in braces there are ranks_per_node, cpus_per_rank"):
        make(scheduler="pbs", mpiexec=("mpiexec", word))


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("name", ["pbs", "flux"])
def test_a_kind_of_job_that_there_is_no_script_for(name: Any) -> None:
    checked = check_training(Path("job.toml"), (), EIGHT)
    with pytest.raises(
        UserError, match=f"scheduler = '{name}': no script for hpcsgd job ensemble; .*compare, train"
    ):
        prepare("ensemble", ["job.toml"], checked, EIGHT, Site(scheduler=name), own={"NUM_GROUPS": "2"})


def commands(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).write_text(f"#!/bin/sh\necho {name} $@ | tee -a called\n")
        (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("here", "name"), [((), "slurm"), (("sbatch",), "slurm"), (("qsub",), "pbs"), (("flux",), "flux")]
)
def test_the_one_that_is_here(here: tuple[str, ...], name: str, tmp_path: Path, monkeypatch: Any) -> None:
    commands(tmp_path, *here)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert scheduler_of(Site()).name == name


def test_two_that_are_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands(tmp_path, "sbatch", "flux")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"sbatch and flux are both here: .* meant: slurm, flux$"):
        scheduler_of(Site())
    assert scheduler_of(Site(scheduler="flux")).name == "flux"


@pytest.mark.parametrize(
    ("name", "said"), [("pbs", "qsub runs/job-train.pbs"), ("flux", "flux batch runs/job-train.flux")]
)
def test_submission(name: str, said: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands(folder, said.split(maxsplit=1)[0])
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    order = make(scheduler=name)
    assert "does not tell beforehand" in estimate(order)
    assert submit(order) == said


def test_the_command_to_type_is_quoted(folder: Path) -> None:
    order = replace(make(scheduler="pbs"), script=Path("runs/a b$(c)-train.pbs"))
    assert shlex.split(by_hand(order)) == ["qsub", "runs/a b$(c)-train.pbs"]


@pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
def test_its_templates_are_there(scheduler: Any) -> None:
    for kind in scheduler.kinds:
        name = scheduler.template(kind)
        text = template(name)
        assert scheduler.directives.prefix in text
        assert fill(text, {"x": "1"}, {}, scheduler.directives) != text
        assert name.endswith(scheduler.suffix)
