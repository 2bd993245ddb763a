"""`hpcsgd.probe` performs the same training as the probe of a job file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import optim
from torch.utils.data import TensorDataset

import hpcsgd
from hpcsgd.comm import Communicator, threads
from hpcsgd.config.schema import load
from hpcsgd.data import ImageDataset
from hpcsgd.performance.probing.job_file import plan_of, probe_config
from hpcsgd.performance.probing.probe import Probe
from performance.probing.test_replicas import JOB, steady
from train.launches import make_store

GIVEN: dict[str, Any] = {"batch_size": 6, "lr": 0.05, "sync_every": 3, "groups": (2, 4), "seeds": (4, 5)}


def sgd(parameters: Any, lr: float) -> optim.Optimizer:
    return optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=1e-3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_store(tmp_path / "small.h5", train=106)
    job = JOB[: JOB.index("warmup_epochs")] + JOB[JOB.index("[method]") :]
    (tmp_path / "job.toml").write_text(job)
    return tmp_path


def samples(folder: Path, part: str) -> TensorDataset:
    store = ImageDataset(folder / "small.h5", part)
    return TensorDataset(*store.collate(store.__getitems__(list(range(len(store))))))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_the_same_distances_as_of_the_job_file(ranks: int, folder: Path) -> None:
    path = folder / "job.toml"
    config = load(path)
    expected = threads.run(1, lambda w: probe_config(config, plan_of(config, path, (2, 4), 2), w))[0]

    def own(world: Communicator) -> Probe:
        data, held_out = samples(folder, "train"), samples(folder, "test")
        return hpcsgd.probe(steady, sgd, data, held_out, world=world, **GIVEN)

    for found in threads.run(ranks, own):
        assert found.verdict == expected.verdict
        for ours, theirs in zip(found.rows, expected.rows, strict=True):
            assert ours.distances == [pytest.approx(series, rel=1e-9) for series in theirs.distances]
            assert ours.losses == [pytest.approx(series, rel=1e-9) for series in theirs.losses]
