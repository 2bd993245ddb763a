"""Natural gradient in a job file: `natural_gradient = { rank = 5 }` under [optimizer]."""

from __future__ import annotations

import importlib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpcsgd.comm import Communicator, threads
from hpcsgd.config.schema import dump, load
from hpcsgd.core.topology import form
from hpcsgd.errors import JobError
from hpcsgd.performance.probing.virtual import virtual_groups
from hpcsgd.train.static_run import StaticRun
from hpcsgd.train.training_setup import TrainingSetup, assemble
from train.launches import JOB, make_store

a_run = importlib.import_module("hpcsgd.train.run")  # the package has a function of that name
STEADY = "--model.name engine.natural_gradient.test_training:steady --model.arguments {}"
NATURAL = "--optimizer.natural_gradient.rank 5 --optimizer.natural_gradient.every 2"


def steady() -> nn.Module:
    """Return a model that is the same on all threads, which share torch's global random generator."""
    layers = nn.Sequential(nn.Flatten(), nn.Linear(36, 10))
    for p in layers.parameters():
        nn.init.constant_(p, 0.5)
    return layers


@pytest.fixture(scope="module")
def job_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    make_store(folder / "small.h5", 48)
    (folder / "job.toml").write_text(JOB)
    return folder / "job.toml"


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcsgd.train.static_run._report", lambda _: None)


class StopAt:
    """A replacement for `Stopping` that stops at a step."""

    def __init__(self, parts: TrainingSetup, step: int) -> None:
        self._parts, self._step = parts, step

    def now(self) -> str | None:
        return "enough" if self._parts.optimizer.t == self._step else None

    def at_once(self) -> str | None:
        return None


def train(
    job_file: Path, folder: Path, words: str, *, n: int = 1, at: int = 0, resume: bool = False
) -> dict[str, Tensor] | None:
    """Return the final model, or None if the run was stopped at step `at`."""

    def one(world: Communicator) -> str | None:
        options = f"{words} --training.epochs 2 --parallel.groups {n} --run.output_dir".split()
        config = load(job_file, [*options, str(folder)])
        parts = assemble(config, form(world, config.parallel.groups), "job.toml")
        stopping: Any = StopAt(parts, at)
        with ExitStack() as files:
            return a_run._train(
                StaticRun(config, parts.optimizer.topology),
                parts,
                stopping,
                world.dup_with_thread(),
                resume,
                files,
            )

    folder.mkdir(exist_ok=True)
    ended = threads.run(n, one)
    return torch.load(folder / "model.pt") if ended[0] is None else None


def same(one: dict[str, Tensor] | None, other: dict[str, Tensor] | None) -> bool:
    assert one is not None
    assert other is not None
    return all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("n", [1, 2])
def test_a_stopped_run_goes_on_to_the_same_bits(job_file: Path, tmp_path: Path, n: int) -> None:
    words = f"{NATURAL} {STEADY}"
    whole = train(job_file, tmp_path / "whole", words, n=n)
    assert not same(whole, train(job_file, tmp_path / "without", STEADY, n=n))
    assert train(job_file, tmp_path / "stopped", words, n=n, at=2) is None
    assert same(whole, train(job_file, tmp_path / "stopped", words, n=n, resume=True))


def test_a_checkpoint_without_estimates_is_resumed(
    job_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(job_file, tmp_path, "", at=2)
    with caplog.at_level("INFO", "hpcsgd"):
        assert train(job_file, tmp_path, NATURAL, resume=True) is not None
    told = [r.getMessage() for r in caplog.records if "natural gradient" in r.getMessage()]
    assert told == ["natural gradient: no saved estimates of this rank for 2 of 2 layers: they start afresh"]


def test_a_checkpoint_with_estimates_is_resumed_without(job_file: Path, tmp_path: Path) -> None:
    train(job_file, tmp_path, NATURAL, at=2)
    assert train(job_file, tmp_path, "", resume=True) is not None


def test_the_job_file(job_file: Path, tmp_path: Path) -> None:
    config = load(job_file, NATURAL.split())
    assert config.optimizer.natural_gradient == {"rank": 5, "every": 2}
    (tmp_path / "again.toml").write_text(dump(config))
    assert load(tmp_path / "again.toml") == config
    assert load(job_file).optimizer.natural_gradient is None


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("rnak 5", r"NaturalGradient has no argument 'rnak'; did you mean 'rank'"),
        ("rank 0", r"NaturalGradient of rank = 0.*needs rank ≥ 1"),
        ("rank 2.5", r"NaturalGradient: rank = 2.5: expected int"),
    ],
)
def test_mistakes_are_reported_in_one_line(job_file: Path, words: str, line: str) -> None:
    config = load(job_file, f"--optimizer.natural_gradient.{words}".split())
    with pytest.raises(JobError, match=rf"^job.toml: \[optimizer\] natural_gradient: {line}[^\n]*$"):
        threads.run(1, lambda world: assemble(config, form(world), "job.toml"))


def test_the_probe_trains_with_it(job_file: Path) -> None:
    def after(words: str) -> Tensor:
        def one(world: Communicator) -> Tensor:
            groups = virtual_groups(load(job_file, words.split()), 2, 1, world)
            groups.train(3)
            return torch.cat([p.detach().reshape(-1) for p in groups.trainees[0].model.parameters()])

        return threads.run(1, one)[0]

    assert not torch.equal(after(NATURAL), after(""))
    assert torch.equal(after(NATURAL), after(NATURAL))
