"""The steps from which δ is chosen are those of the job, except that all groups synchronize in each."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import optim

from hpcsgd.comm import Communicator, threads
from hpcsgd.config.schema import load
from hpcsgd.core.step import StepContext
from hpcsgd.core.topology import form
from hpcsgd.core.traits import ScheduleTraits
from hpcsgd.errors import UserError
from hpcsgd.methods import Method
from hpcsgd.parts.averagers import Mean
from hpcsgd.parts.grad_reduces import AllToAll
from hpcsgd.performance.probing import delta
from hpcsgd.performance.probing.changes import changes_of
from hpcsgd.train.training_setup import TrainingSetup, assemble
from train.launches import JOB, make_store

STEPS, AN_EPOCH = 14, 6
METHOD = 'name = "selsync"\ndelta = 0.3'
INJECTION = "--data.injection {alpha=0.5,beta=0.5}"


@pytest.fixture(scope="module")
def job_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    make_store(folder / "small.h5", 96)
    (folder / "job.toml").write_text(JOB.replace('name = "hierarchical"\nsync_every = 2', METHOD))
    return folder / "job.toml"


def measured(job_file: Path, words: str) -> list[delta.Changes]:
    def one(world: Communicator) -> delta.Changes:
        options = f"--parallel.groups 2 --data.group_batch_size 8 {words}".split()
        config = delta.synchronizing_always(load(job_file, options), job_file)
        return delta.measure(config, form(world, 2), job_file, STEPS)

    return threads.run(2, one)


@pytest.mark.parametrize("words", ["", INJECTION], ids=["plain", "injected"])
def test_beyond_an_epoch(job_file: Path, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    """Of an injected batch of 8, 5 samples are the group's own and 3 are the other group's."""
    seen: set[int] = set()

    def watched(*given: Any) -> TrainingSetup:
        parts = assemble(*given)
        parts.model.register_forward_pre_hook(lambda _, x: seen.add(len(x[0])))
        return parts

    monkeypatch.setattr(delta, "assemble", watched)
    ranks = measured(job_file, words)
    assert ranks[0].deltas.shape == (STEPS - 1, 2)
    assert (ranks[0].deltas == ranks[1].deltas).all()
    assert seen == {8}


@dataclass
class Jumpy:
    """A user's schedule that has a threshold."""

    notes: bool
    traits = ScheduleTraits(threshold=0.5)

    def __call__(self, s: StepContext) -> bool:
        if self.notes:
            s.metrics["delta"] = 10.0 * s.topology.group_index + s.t
        return True


def jumpy(delta: float, notes: bool = True) -> Method:
    return Method(AllToAll(), Jumpy(notes), Mean())


def test_a_schedule_of_the_users_notes_how_much_its_group_has_changed(job_file: Path) -> None:
    own = f"--method.name {__name__}:jumpy"
    for changes in measured(job_file, own):
        assert changes.deltas.tolist() == [[t, 10.0 + t] for t in range(2, STEPS + 1)]
    with pytest.raises(UserError, match=r'has to note s.metrics\["delta"\]'):
        measured(job_file, f"{own} --method.notes false")


def test_what_is_written(job_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load(job_file, ["--run.output_dir", str(tmp_path / "run")])
    delta._write(changes_of([[0.0, 0.0], [1.0, 2.0]]), config)
    folder = tmp_path / "run-delta"
    assert json.loads((folder / "delta.json").read_text())["deltas"] == [[1.0, 2.0]]
    assert sorted(path.name for path in folder.iterdir()) == ["delta.json", "delta.png"]
    assert capsys.readouterr().out.startswith(f"written {folder}/delta.json and delta.png;")


def test_the_rate_falls_after_an_epoch(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    step = optim.SGD.step

    def watched(self: optim.SGD, *given: object) -> object:
        rates.append(self.param_groups[0]["lr"])
        return step(self, *given)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(torch.optim.SGD, "step", watched)
    words = "--lr_schedule.scaling linear --lr_schedule.name StepLR"
    measured(job_file, f"{words} --lr_schedule.arguments {{step_size=1,gamma=0.5}}")
    assert sorted(rates, reverse=True)[::2] == [0.2] * AN_EPOCH + [0.1] * AN_EPOCH + [0.05] * 2
