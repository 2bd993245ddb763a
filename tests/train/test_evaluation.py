from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

from hpcsgd.comm import Communicator, threads
from hpcsgd.config.schema import load
from hpcsgd.core.topology import form
from hpcsgd.data import ImageDataset
from hpcsgd.train import evaluation
from hpcsgd.train.evaluation import evaluate
from hpcsgd.train.training_setup import TrainingSetup, assemble
from train.launches import JOB, make_store

TRAIN, TEST = 48, 23


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    folder = tmp_path / str(os.getpid())  # under mpiexec every rank makes its own folder
    folder.mkdir()
    make_store(folder / "small.h5", TRAIN, TEST)
    (folder / "job.toml").write_text(JOB)
    return folder / "job.toml"


class Recorder(nn.Module):
    """A module that records its inputs and returns them unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return x


def net() -> nn.Module:
    """Return a model whose values do not depend on torch's global generator, which all threads share."""
    layers = nn.Sequential(
        Recorder(), nn.Flatten(), nn.Linear(36, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 10)
    )
    fill(layers, 1)
    return layers


def fill(model: nn.Module, seed: int) -> None:
    generator = Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / 3)


def fill_buffers(model: nn.Module, seed: int) -> None:
    generator = Generator().manual_seed(100 + seed)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)


def parts_of(world: Communicator, job_file: Path, P: int) -> TrainingSetup:
    """Return parts as after training: groups differ in parameters, and all ranks in batch-norm statistics."""
    words = ("--model.name", "train.test_evaluation:net", "--model.arguments", "{}")
    parts = assemble(load(job_file, words), form(world, P), "job.toml")
    fill(parts.model, parts.optimizer.topology.group_index)
    fill_buffers(parts.model, world.rank)
    parts.model[0].seen.clear()  # type: ignore[index]
    return parts


def reference(P: int, N: int, data: ImageDataset) -> tuple[float, float]:
    """Return loss and accuracy as one process computes them, which averages all models by hand."""
    models, means = [net() for _ in range(N)], net()
    for rank, model in enumerate(models):
        fill(model, rank * P // N)
        fill_buffers(model, rank)
    with torch.no_grad():
        for name, mean in means.state_dict(keep_vars=True).items():
            if mean.is_floating_point():
                mean.copy_(torch.stack([model.state_dict()[name].double() for model in models]).mean(0))
        means.eval()
        x, y = ImageDataset.collate(data.__getitems__(range(len(data))))
        scores = means(x)
    return cross_entropy(scores, y).item(), (scores.argmax(1) == y).double().mean().item()


SHAPES = [(1, 1), (1, 2), (2, 1), (1, 4), (2, 2), (4, 1)]


@pytest.mark.parametrize(("P", "K"), SHAPES)
def test_the_score_is_that_of_one_process(
    run: Callable[..., list[Any]], job_file: Path, monkeypatch: pytest.MonkeyPatch, P: int, K: int
) -> None:
    monkeypatch.setattr(evaluation, "BATCH", 4)

    def score(world: Communicator) -> tuple[float, float]:
        found = evaluate(parts_of(world, job_file, P))
        return found.loss, found.figures["accuracy"]

    loss, accuracy = reference(P, P * K, ImageDataset(job_file.parent / "small.h5", "test"))
    for found in run(P * K, score):
        assert found == (pytest.approx(loss, rel=1e-5), pytest.approx(accuracy))


def test_the_reference_tells_models_apart(job_file: Path) -> None:
    """If models had the same loss, the test above could not fail."""
    data = ImageDataset(job_file.parent / "small.h5", "test")
    losses = [reference(P, P * K, data)[0] for P, K in SHAPES]
    assert min(abs(a - b) for i, a in enumerate(losses) for b in losses[:i]) > 1e-3


@pytest.mark.threads(unless={"n": 4})
@pytest.mark.parametrize("n", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [1, 3, TEST])
def test_every_sample_counts_once(
    run: Callable[..., list[Any]], job_file: Path, monkeypatch: pytest.MonkeyPatch, n: int, count: int
) -> None:
    monkeypatch.setattr(evaluation, "BATCH", 2)
    make_store(job_file.parent / "small.h5", TRAIN, count)

    def seen(world: Communicator) -> list[Tensor]:
        parts = parts_of(world, job_file, 1)
        evaluate(parts)
        return parts.model[0].seen  # type: ignore[index]

    tested = torch.cat([batch for rank in run(n, seen) for batch in rank])
    samples = ImageDataset(job_file.parent / "small.h5", "test").__getitems__(range(count)).x
    different, times = tested.unique(dim=0, return_counts=True)
    assert torch.equal(different, samples.unique(dim=0))
    assert times.tolist() == [1] * count


def test_random_numbers_of_an_evaluation_do_not_change_training(job_file: Path) -> None:
    """A run that goes on after an evaluation, and one that makes up for it, have the same numbers."""

    def draws(world: Communicator) -> bool:
        parts = parts_of(world, job_file, 1)
        parts.model.register_forward_hook(lambda *_: drawn.append(random.random() + torch.rand(()).item()))
        state, drawn = (random.getstate(), torch.get_rng_state()), list[float]()
        evaluate(parts)
        return bool(drawn) and random.getstate() == state[0] and torch.equal(torch.get_rng_state(), state[1])

    assert threads.run(1, draws) == [True]


@pytest.mark.parametrize("n", [1, 2, 4])
def test_training_goes_on_as_if_nothing_had_been(
    run: Callable[..., list[Any]], job_file: Path, n: int
) -> None:
    def changed(world: Communicator) -> list[str]:
        parts = parts_of(world, job_file, n)
        before = copy.deepcopy(parts.model.state_dict())
        evaluate(parts)
        assert all(module.training for module in parts.model.modules())
        after = parts.model.state_dict()
        return [name for name, value in before.items() if not torch.equal(value, after[name])]

    assert run(n, changed) == [[]] * n
