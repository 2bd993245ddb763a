"""Tests of `hpcsgd train` on a device: it trains the bits of the host, and no step waits for the device."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from far.ranks import PATTERNS, slowed
from hpcsgd.comm import Communicator, threads
from hpcsgd.config.schema import load
from hpcsgd.core.topology import form
from hpcsgd.errors import JobError
from train.launches import JOB, make_store

pytestmark = pytest.mark.usefixtures("far_device")

a_run = importlib.import_module("hpcsgd.train.run")  # the package has a function of that name
TRAIN, TEST = 48, 20
FOUR = "--parallel.groups 2 --data.group_batch_size 8 --training.epochs 2"


@pytest.fixture(scope="module")
def job_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    make_store(folder / "small.h5", TRAIN, TEST)
    (folder / "job.toml").write_text(
        JOB.replace('"mlp"', '"train.small:steady"').replace("hidden = [8]", "norm = false")
    )
    return folder / "job.toml"


@pytest.fixture(autouse=True)
def unlaunched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcsgd.train.static_run._report", lambda _: None)
    monkeypatch.setattr("hpcsgd.comm.backend_choice.launched", lambda *_: None)


class StopsAfter:
    """A stand-in for `Stopping`, which handles signals and so needs the main thread."""

    def __init__(self, steps: int | None) -> None:
        self._left = steps

    def now(self) -> str | None:
        if self._left is not None:
            self._left -= 1
        return "enough" if self._left == 0 else None

    def at_once(self) -> str | None:
        return None


def train(
    job_file: Path,
    folder: Path,
    words: str,
    *,
    n: int = 4,
    on: str = "auto",
    slow: str = "none",
    stop: int | None = None,
    resume: bool = False,
) -> dict[str, Tensor]:
    """Run on `n` threads, and return the model of the finished run, or nothing for one that stopped."""

    def one(world: Communicator) -> None:
        config = load(job_file, [*words.split(), "--training.device", on, "--run.output_dir", str(folder)])
        reasons: Any = None
        with slowed(torch.device("far", world.rank), PATTERNS[slow]):
            a_run.train(config, form(world, config.parallel.groups), "job.toml", reasons, resume)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(a_run, "Stopping", lambda *_: StopsAfter(stop))
        threads.run(n, one)
    return torch.load(folder / "model.pt") if stop is None else {}


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record for record in found if record["kind"] == kind]


def assert_same(mine: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert mine.keys() == expected.keys()
    for name, value in mine.items():
        assert value.is_cpu
        assert torch.equal(value, expected[name]), name


NATURAL = "--optimizer.natural_gradient.rank 2"
RUNS = {
    "hierarchical": "--optimizer.arguments.momentum 0.9",
    "groups that give each other samples": "--data.injection.alpha 0.5 --data.injection.beta 0.5",
    "natural gradient": NATURAL,
    "a loader that works ahead": "--data.num_workers 1",
}


@pytest.mark.slow
@pytest.mark.parametrize("words", RUNS.values(), ids=list(RUNS))
def test_the_model_is_the_one_of_the_host(words: str, job_file: Path, tmp_path: Path) -> None:
    host, device = tmp_path / "host", tmp_path / "device"
    expected = train(job_file, host, f"{FOUR} {words}", on="cpu")
    assert_same(train(job_file, device, f"{FOUR} {words}"), expected)
    for kind, number in (("step", "loss"), ("eval", "loss"), ("sync", "distance")):
        ours, theirs = ([record[number] for record in records(f, kind)] for f in (device, host))
        assert ours == theirs
        assert ours


@pytest.mark.slow
@pytest.mark.parametrize("slow", ["default stream slow", "all others slow"])
def test_slow_streams_change_nothing(slow: str, job_file: Path, tmp_path: Path) -> None:
    expected = train(job_file, tmp_path / "host", FOUR, on="cpu")
    assert_same(train(job_file, tmp_path / "device", FOUR, slow=slow), expected)


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "resumed"), [("far", "far"), ("cpu", "far"), ("far", "cpu")])
def test_a_run_that_was_stopped_goes_on(saved: str, resumed: str, job_file: Path, tmp_path: Path) -> None:
    expected = train(job_file, tmp_path / "host", FOUR, on="cpu")
    train(job_file, tmp_path / "stopped", FOUR, on=saved, stop=4)
    assert_same(train(job_file, tmp_path / "stopped", FOUR, on=resumed, resume=True), expected)
    starts = json.loads((tmp_path / "stopped" / "versions.json").read_text())
    each = {"cpu": {"cpu": 4}, "far": dict.fromkeys((f"far:{i}" for i in range(4)), 1)}
    assert [start["devices"] for start in starts] == [each[saved], each[resumed]]


def test_a_device_goes_on_with_the_random_numbers_that_were_next(job_file: Path, tmp_path: Path) -> None:
    """The test has one rank, because threads share the seed that they give to all devices."""
    words = "--model.name train.small:dropping --training.epochs 2"
    expected = train(job_file, tmp_path / "whole", words, n=1)
    train(job_file, tmp_path / "stopped", words, n=1, stop=4)
    assert_same(train(job_file, tmp_path / "stopped", words, n=1, resume=True), expected)


def test_a_loss_that_is_no_number_ends_the_run_at_the_next_reading(job_file: Path, tmp_path: Path) -> None:
    words = f"{FOUR} --training.log_every 4 --optimizer.lr 1e30"
    with pytest.raises(JobError, match=r"the loss is (nan|inf) at step 3: try a lower learning rate"):
        train(job_file, tmp_path / "run", words)
    assert not (tmp_path / "run" / "model.pt").exists()


@pytest.mark.parametrize(
    ("words", "n", "waited"),
    [
        ("", 1, 0),
        (NATURAL, 1, 1),
        ("--parallel.groups 2 --data.group_batch_size 8 --method.sync_every 99", 4, 2),
    ],
)
def test_in_a_step_the_host_waits_for_staging_alone(
    words: str, n: int, waited: int, job_file: Path, tmp_path: Path
) -> None:
    """Check the waits that another epoch of three steps adds: data to send, and one reading.

    Natural gradient of all layers together waits for work that it gave the device in the step before.
    """
    waits: list[Counter[str]] = []
    for epochs in (1, 2):
        seldom = "--training.log_every 99 --training.eval_every_epochs 2 --training.checkpoint_every_steps 99"
        torch.ops.far.forget_waits()
        train(job_file, tmp_path / f"{epochs}", f"{words} {seldom} --training.epochs {epochs}", n=n)
        waits.append(Counter(torch.ops.far.waits(n - 1)))
    assert waits[1] - waits[0] == Counter(item=1) + Counter(event=3 * waited)
