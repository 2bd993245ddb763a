"""Tests of the way from a job file to a script, without Slurm."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

import programs
from hpcsgd.cluster.batch import (
    Allocation,
    BatchJob,
    Site,
    check_comparison,
    check_ensemble,
    check_measure,
    check_probe,
    check_training,
    prepare,
)
from hpcsgd.cluster.batch.batch_job import estimate, submit
from hpcsgd.config.schema import load
from hpcsgd.errors import UserError
from hpcsgd.train.probe_answer import setting
from train.launches import JOB, make_store

EIGHT = Allocation(nodes=2, ranks_per_node=4, time="2:00:00")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_store(tmp_path / "small.h5")
    (tmp_path / "job.toml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make(*overrides: str, allocation: Allocation = EIGHT, site: Site | None = None, **how: Any) -> BatchJob:
    checked = check_training(Path("job.toml"), overrides, allocation, fresh=True, **how)
    return prepare("train", ["job.toml", *overrides], checked, allocation, site or Site())


def test_the_script(folder: Path) -> None:
    site = Site(partition="long", mpi="pmix", modules=("mpi",), srun=("--exclusive",))
    order = make("--parallel.groups", "2", "--training.epochs", "3", site=site)
    assert order.script == Path("runs/job-train.sbatch")
    text = order.script.read_text()
    for line in (
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=4",
        "#SBATCH --time=2:00:00",
        "#SBATCH --partition=long",
        "#SBATCH --output=runs/job-train-%j.log",
        f"#SBATCH --chdir={shlex.quote(str(folder))}",
    ):
        assert f"{line}\n" in text
    for value in (
        "JOB=(job.toml --parallel.groups 2 --training.epochs 3) ",
        f"PYTHON={sys.executable} ",
        "MODULES=(mpi) ",
        "MPI=pmix ",
        "SRUN=(--exclusive) ",
        "RUN=runs/job ",
    ):
        assert f"\n{value}" in text
    programs.run(["bash", "-n", order.script])


def test_a_name_that_would_be_a_command_is_refused(folder: Path) -> None:
    name = "a\ntouch there #.toml"
    (folder / name).write_text(JOB)
    checked = check_training(Path(name), [], EIGHT, fresh=True)
    with pytest.raises(UserError, match="cannot stand in a batch script"):
        prepare("train", [name], checked, EIGHT, Site())
    assert not list(folder.rglob("*.sbatch"))
    assert not (folder / "runs").exists()


@pytest.mark.parametrize("kind", ["train", "bench", "probe", "measure", "ensemble", "compare"])
def test_gpus_and_what_is_near_them(folder: Path, kind: str) -> None:
    """The script of every kind of job has the options for GPUs and their binding."""
    site = Site(gpu_bind="none", mem_bind="local", environment={"MPICH_GPU_SUPPORT_ENABLED": "1", "A": "b c"})
    allocation = Allocation(nodes=2, ranks_per_node=4, gpus_per_node=4)
    own = {"ensemble": {"NUM_GROUPS": "2"}, "compare": {"COMMAND": "compare"}}.get(kind, {})
    checked = check_training(Path("job.toml"), (), allocation)
    text = prepare(kind, ["job.toml"], checked, allocation, site, own=own).script.read_text()
    assert "#SBATCH --gpus-per-node=4\n" in text
    assert "\nBIND=(--cpu-bind=cores --gpu-bind=none --mem-bind=local) " in text
    assert "\nENVIRONMENT=(MPICH_GPU_SUPPORT_ENABLED=1 'A=b c') " in text
    assert text.count("${BIND[") == text.count('export "${ENVIRONMENT[@]}"') == 1


def test_a_packed_environment_starts_the_ranks(folder: Path) -> None:
    site = Site(pack=Path("env.pack"))
    with pytest.raises(UserError, match=r"pack = env\.pack: not a packed environment: hpcsgd job pack makes"):
        make(site=site)
    (folder / "env.pack").write_text("#!/bin/sh\n")
    (folder / "env.pack").chmod(0o755)
    assert f"\nPYTHON={shlex.quote(f'{folder}/env.pack')} " in make(site=site).script.read_text()


def test_what_it_asks_for(folder: Path) -> None:
    assert str(make("--parallel.groups", "2")).splitlines() == [
        "script    runs/job-train.sbatch",
        "ranks     8 on 2 nodes: 2 groups of 4, each on one node",
        "asks for  2 nodes for 2:00:00: 4 node hours a start, and may start 21 times",
    ]


def test_groups_that_do_not_fit_a_node(folder: Path) -> None:
    order = make("--parallel.groups", "2", allocation=Allocation(nodes=4, ranks_per_node=2))
    assert "2 of them on more than one node" in order.placement


def test_nothing_is_left_of_the_check(folder: Path) -> None:
    make()
    assert sorted(path.name for path in folder.iterdir()) == ["job.toml", "runs", "small.h5"]
    assert [path.name for path in (folder / "runs").iterdir()] == ["job-train.sbatch"]


def test_to_be_resumed(folder: Path) -> None:
    (folder / "runs" / "job" / "checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match="runs/job: holds a run: pass --resume"):
        make()
    check_training(Path("job.toml"), (), EIGHT)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["--parallel.groups", "3"],
            "groups = 3 does not divide the 8 ranks of the job; allowed: 1, 2, 4, 8",
        ),
        (
            ["--data.group_batch_size", "12"],
            "group_batch_size = 12 is the batch of a group of 8 ranks: give a multiple of 8",
        ),
        (["--data.path", "none.h5"], r"\[data\] path: .*none.h5"),
        (["--method.name", "hierachical"], "did you mean 'hierarchical'"),
        (["--optimizer.name", "SDG"], "did you mean 'SGD'"),
        (["--model.name", "no.module:net"], "no.module"),
    ],
)
def test_mistakes(folder: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make(*overrides)
    assert not (folder / "runs").exists()


def test_without_slurm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(folder))
    order = make()
    assert estimate(order) == "not here: not asked whether it would take the job"
    with pytest.raises(UserError, match=r"--submit: there is no sbatch here; .*: sbatch runs/job-train"):
        submit(order)


def test_a_job_that_slurm_refuses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid account' >&2\nexit 1\n")
    (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    with pytest.raises(UserError, match=r"sbatch --test-only .*: sbatch: error: invalid account"):
        estimate(make())


def a_probe(folder: Path, P: int) -> Path:
    config = load(folder / "job.toml")
    found = {"P": P, "unclear": None, "rows": [], "setting": setting(config)}
    (folder / "probe.json").write_text(json.dumps(found))
    return Path("probe.json")


def test_as_many_groups_as_a_probe_found(folder: Path) -> None:
    assert make(probe=a_probe(folder, 4)).placement == "4 groups of 2, each on one node"


def test_a_probe_that_is_yet_to_come(folder: Path) -> None:
    assert make(probe=Path("p.json"), awaited=True).placement == "as many groups as p.json will tell"
    with pytest.raises(UserError, match=r"p.json: not the probe.json of a probe"):
        make(probe=Path("p.json"))


def test_the_script_of_a_probe(folder: Path) -> None:
    order = prepare("probe", ["job.toml"], check_probe(Path("job.toml"), ()), EIGHT, Site())
    assert order.script == Path("runs/job-probe.sbatch")
    assert "may start" not in str(order)
    programs.run(["bash", "-n", order.script])


def test_the_script_of_a_measurement(folder: Path) -> None:
    checked = check_measure(Path("job.toml"), ("--data.group_batch_size", "4"))
    order = prepare("measure", ["job.toml"], checked, EIGHT, Site())
    assert order.script == Path("runs/job-measure.sbatch")
    assert "may start" not in str(order)
    programs.run(["bash", "-n", order.script])
    with pytest.raises(UserError, match="did you mean 'mlp'"):
        check_measure(Path("job.toml"), ("--model.name", "mpl"))


def test_the_script_of_a_comparison(folder: Path) -> None:
    methods = "bsp, hierarchical sync_every=8 parallel.groups=4, sgp parallel.groups=4"
    checked = check_comparison(Path("job.toml"), (), methods, EIGHT, fresh=True)
    order = prepare(
        "compare", ["job.toml", "--methods", methods], checked, EIGHT, Site(), own={"COMMAND": "compare"}
    )
    assert order.script == Path("runs/job-compare.sbatch")
    assert order.placement == (
        "3 variants in turn, 1 group of 8, 1 of them on more than one node: their gradients cross the "
        "network at every step; let group_size divide --ranks-per-node; 4 groups of 2, each on one node"
    )
    assert order.starts > 1
    text = order.script.read_text()
    assert f"\nJOB=(job.toml --methods '{methods}') " in text
    assert "\nCOMMAND=compare " in text
    assert "\nRUN=runs/job " in text
    programs.run(["bash", "-n", order.script])
    (folder / "runs" / "job-compare" / "bsp").mkdir(parents=True)
    with pytest.raises(UserError, match="runs/job-compare: holds a run: pass --resume"):
        check_comparison(Path("job.toml"), (), methods, EIGHT, fresh=True)


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ("bsp, hierachical", "variant 'hierachical': job.toml: .*did you mean 'hierarchical'"),
        (
            "bsp, ensemble_sync sync_every=8",
            "variant 'ensemble_sync sync_every=8': method ensemble_sync is for groups that are jobs",
        ),
        (
            "bsp, bsp parallel.groups=3",
            r"variant 'bsp parallel.groups=3': job.toml: \[parallel\]: groups = 3 does not divide",
        ),
    ],
)
def test_mistakes_of_a_comparison(folder: Path, methods: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_comparison(Path("job.toml"), (), methods, EIGHT)
    assert not (folder / "runs").exists()


def test_groups_that_may_die(folder: Path) -> None:
    words = ["--method.name", "ensemble_sync", "--parallel.groups", "4"]
    checked = check_ensemble(Path("job.toml"), words, EIGHT, fresh=True)
    order = prepare("ensemble", ["job.toml", *words], checked, EIGHT, Site(), own={"NUM_GROUPS": "4"})
    assert str(order).splitlines()[:2] == [
        "script    runs/job-ensemble.sbatch",
        "ranks     8 on 2 nodes: 4 groups of 2, each on one node, which the others survive",
    ]
    text = order.script.read_text()
    assert "\nNUM_GROUPS=4 " in text
    assert "#SBATCH --no-kill\n" in text
    programs.run(["bash", "-n", order.script])
    (folder / "runs" / "job").mkdir()
    (folder / "runs" / "job" / "job.toml").touch()
    with pytest.raises(UserError, match="runs/job: holds a run: pass --resume"):
        check_ensemble(Path("job.toml"), words, EIGHT, fresh=True)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--method.name", "hierarchical"], "name = hierarchical: elastic groups need ensemble_sync"),
        ([], "how many groups"),
        (["--parallel.groups", "3"], "3 groups of 8 tasks: give a group size, or fitting tasks"),
        (["--parallel.groups", "4", "--method.sync_evry", "4"], "did you mean 'sync_every'"),
        (["--parallel.groups", "4", "--model.name", "no.module:net"], "no.module"),
    ],
)
def test_mistakes_with_groups_that_may_die(folder: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_ensemble(Path("job.toml"), ["--method.name", "ensemble_sync", *overrides], EIGHT)
    with pytest.raises(UserError, match="in a batch job with `hpcsgd job ensemble`"):
        make("--method.name", "ensemble_sync")


def test_a_probe_of_what_it_cannot_judge(folder: Path) -> None:
    (folder / "job.toml").write_text(JOB.replace('name = "hierarchical"\nsync_every = 2', 'name = "bsp"'))
    with pytest.raises(UserError, match="the probe needs a method that averages models after"):
        check_probe(Path("job.toml"), ())
