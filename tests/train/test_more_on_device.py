"""Tests of compare, δ probing and elastic groups on a device; they have the same bits as on the host."""

from __future__ import annotations

import importlib
import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from elastic.conftest import Desk, desk
from hpcsgd.comm import Communicator, threads
from hpcsgd.config.schema import load
from hpcsgd.config.variants import configs
from hpcsgd.core.topology import form
from hpcsgd.performance import comparing
from hpcsgd.performance.probing import delta
from in_parallel import at_once
from train.interruptions import Never, without_pictures
from train.launches import JOB, make_store
from train.replica_groups_of_threads import NO_NORM, World, assert_same

__all__ = ["desk"]

pytestmark = pytest.mark.usefixtures("far_device")
STEADY = ["--model.name", "train.small:steady", "--model.arguments", "{ inputs = 36, norm = false }"]
TWO = ["--parallel.groups", "2", "--data.group_batch_size", "8", *STEADY]
WHERE = ("cpu", "auto")


@pytest.fixture(scope="module")
def job_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    make_store(folder / "small.h5", 96, 20)
    (folder / "job.toml").write_text(JOB.replace("momentum = 0", ""))
    return folder / "job.toml"


@pytest.fixture(autouse=True)
def unlaunched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcsgd.train.static_run._report", lambda _: None)
    monkeypatch.setattr("hpcsgd.comm.backend_choice.launched", lambda *_: None)
    monkeypatch.setattr("hpcsgd.performance.comparing._show", lambda *_: None)
    monkeypatch.setattr("hpcsgd.performance.comparing.gc", SimpleNamespace(collect=lambda: None))
    without_pictures(monkeypatch)


@pytest.mark.slow
def test_methods_are_compared(job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("hpcsgd.train.run"), "Stopping", Never)
    losses: list[list[float]] = []
    for on in WHERE:
        folder = tmp_path / on

        def one(world: Communicator, on: str = on, folder: Path = folder) -> str | None:
            words = [*TWO, "--training.device", on, "--run.output_dir", str(folder)]
            reasons: Any = None
            return comparing.compare(
                world, job_file, configs(job_file, words, "bsp, sgp"), reasons, resume=False
            )

        assert threads.run(2, one) == [None, None]
        files = [tmp_path / f"{on}-compare" / name / "metrics.jsonl" for name in ("bsp", "sgp")]
        records = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        losses.append([record["loss"] for record in records if record["kind"] == "step"])
    assert losses[0] == losses[1]
    assert len(losses[0]) == 12


def test_steps_for_a_delta(job_file: Path) -> None:
    file = job_file.with_name("selsync.toml")
    file.write_text(JOB.replace('name = "hierarchical"\nsync_every = 2', 'name = "selsync"\ndelta = 0.3'))

    def one(world: Communicator, on: str) -> dict[str, Any]:
        config = delta.synchronizing_always(load(file, [*TWO, "--training.device", on]), file)
        return asdict(delta.measure(config, form(world, 2), file, 5))

    host, device = (threads.run(2, one, on)[0] for on in WHERE)
    np.testing.assert_equal(device, host)


@pytest.mark.slow
def test_groups(job_file: Path, tmp_path: Path, desk: Desk) -> None:
    models: list[list[Any]] = []
    for on in WHERE:
        with desk.coordinator(2) as at:
            words = ["--training.epochs", "1", "--optimizer.arguments.momentum", "0.9", *NO_NORM]
            world = World(at, job_file, tmp_path / on, [*words, "--training.device", on])
            lives = at_once(lambda w=world: w.live(0, 2, 2), lambda w=world: w.live(1, 2, 1))
            models.append([life.model for ranks in lives for life in ranks])
    for expected, mine in zip(*models, strict=True):
        assert_same({name: value.cpu() for name, value in mine.items()}, expected)
