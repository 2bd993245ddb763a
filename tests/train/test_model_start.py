"""Tests of `[model] init_from`: a training starts from exported weights, unless its run has a checkpoint."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcsgd import models
from hpcsgd.comm import Communicator, threads
from hpcsgd.config.schema import dump, load
from hpcsgd.core.topology import form
from hpcsgd.errors import JobError
from hpcsgd.performance.probing.virtual import virtual_groups
from hpcsgd.train.evaluation import evaluate
from hpcsgd.train.export import export
from hpcsgd.train.run import to_begin
from hpcsgd.train.training_setup import assemble
from train.export.test_export import GPT, trained, write_text
from train.interruptions import without_pictures
from train.launches import launch

STILL = ("--optimizer.lr", "1e-30")
"""With this rate a step leaves all weights as they are."""


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    without_pictures(monkeypatch)
    folder = tmp_path / str(os.getpid())  # under mpiexec every rank makes its own folder
    folder.mkdir()
    return write_text(folder, "bytes")


def evaluations(run: Path) -> list[float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if record["kind"] == "eval"]


@pytest.mark.parametrize("kind", ["safetensors", "dcp"])
def test_it_begins_where_the_other_ended(job_file: Path, kind: str) -> None:
    folder = job_file.parent
    run = trained(job_file, folder / "run", "--parallel.groups", "2", n=2)
    export(run, kind, folder / "out")
    job_file.write_text(GPT.replace('name = "gpt"', 'init_from = "out", name = "gpt"'))

    def loss(world: Communicator) -> float:
        return evaluate(assemble(load(job_file), form(world, 2), "job.toml")).loss

    assert threads.run(2, loss) == [evaluations(run)[-1]] * 2


def test_only_one_rank_reads(job_file: Path) -> None:
    """The other ranks are given files that do not exist."""
    theirs = models.gpt(256, width=8, layers=1, heads=2).state_dict()
    torch.save(theirs, job_file.parent / "of-0.pt")

    def started(world: Communicator) -> dict[str, Any]:
        config = load(job_file, ["--model.init_from", str(job_file.parent / f"of-{world.rank}.pt")])
        return dict(assemble(config, form(world, 2), "job.toml").model.state_dict())

    for found in threads.run(4, started):
        assert all(torch.equal(found[name], x) for name, x in theirs.items())


def test_the_probe_begins_there_too(job_file: Path) -> None:
    run = trained(job_file, job_file.parent / "run")
    config = load(job_file, ["--model.init_from", str(run), "--method.name", "hierarchical"])
    groups = threads.run(1, lambda world: virtual_groups(config, 2, 1, world))[0]
    expected = torch.load(run / "model.pt")
    for trainee in groups.trainees:
        assert all(torch.equal(x, expected[n]) for n, x in trainee.model.state_dict().items())


def test_where_the_file_is_meant_from(job_file: Path) -> None:
    job_file.write_text(GPT.replace('name = "gpt"', 'init_from = "a/b.safetensors", name = "gpt"'))
    config = load(job_file)
    assert config.model.init_from == job_file.parent / "a" / "b.safetensors"
    assert load(job_file, ["--model.init_from", "b"]).model.init_from == Path.cwd() / "b"
    (job_file.parent / "again.toml").write_text(dump(config))
    assert load(job_file.parent / "again.toml").model.init_from == config.model.init_from


def test_only_a_checkpoint_goes_first(job_file: Path) -> None:
    config = load(job_file, ["--model.init_from", "x.pt", "--run.output_dir", str(job_file.parent / "run")])
    checkpoints = job_file.parent / "run" / "checkpoints"
    for name in ("step-00000100.bak", "step-0000010"):
        (checkpoints / name).mkdir(parents=True)
    assert to_begin(config, goes_on=True) == config
    (checkpoints / "step-00000100").mkdir()
    (checkpoints / "step-00000100" / "manifest.json").touch()
    assert to_begin(config, goes_on=True).model.init_from is None
    assert to_begin(config, goes_on=False) == config


def test_what_does_not_fit_is_reported_by_all(job_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.save({"x": torch.ones(1)}, job_file.parent / "x.pt")
    config = load(job_file, ["--model.init_from", str(job_file.parent / "x.pt")])

    def refused(world: Communicator) -> str:
        with pytest.raises(JobError) as caught:
            assemble(config, form(world, 2), "job.toml")
        return str(caught.value)

    with caplog.at_level(logging.INFO):
        lines = threads.run(2, refused)
    assert lines[0] == lines[1]
    assert lines[0].startswith(
        f"rank 0 of 2, preparing the run: job.toml: [model] init_from: {job_file.parent}/x.pt: "
        "lacks blocks.0."
    )


@pytest.mark.slow
def test_launched(job_file: Path) -> None:
    """A run from exported weights begins with the same evaluation and weights.

    With --resume the file may be missing.
    """
    folder = job_file.parent
    assert (
        launch(folder, "train", "job.toml", "--parallel.groups", "2", "--run.output_dir", "one", n=2).code
        == 0
    )
    done = launch(folder, "export", "one", "--to", "model.safetensors")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("model.safetensors: 9 tensors, 2,840 numbers, from one/model.pt after step 5")
    again = ("train", "job.toml", "--model.init_from", "model.safetensors", "--run.output_dir", "two", *STILL)
    words = ("--parallel.groups", "2", "--method.name", "bsp")
    job_file.write_text(GPT.replace(", sync_every = 2", ""))
    done = launch(folder, *again, *words, n=2)
    assert done.code == 0, done.err
    assert f"the model starts from {folder}/model.safetensors\n" in (folder / "two/run.log").read_text()
    assert evaluations(folder / "two")[-1] == evaluations(folder / "one")[-1]
    one, two = (torch.load(folder / name / "model.pt") for name in ("one", "two"))
    assert all(torch.equal(x, two[name]) for name, x in one.items())
    (folder / "model.safetensors").unlink()
    done = launch(folder, *again, *words, "--training.steps", "7", "--resume", n=2)
    assert done.code == 0, done.err
    assert "resuming at step 5" in done.out
    assert "the model starts" not in done.out
    done = launch(folder, *again, *words, "--run.output_dir", "three", n=2)
    line = f"job.toml: [model] init_from: {folder}/model.safetensors: no such file"
    assert done.messages == [f"hpcsgd: rank 0 of 2, preparing the run: {line}"]
