"""Virtual groups go through the training of real ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hpcsgd.errors import UserError
from hpcsgd.topology import form
from hpcsgd.training.assembly import assemble
from hpcsgd.training.config import Config, load
from hpcsgd.training.virtual import virtual_groups
from hpcsgd.transport import Transport, threads
from training.launches import make_store

EVERY, MEETINGS = 3, 5
JOB = """
seed = 4
[job]
groups = 4
[data]
store = "small.h5"
batch_size = 6
[model]
build = "tuning.test_replicas:steady"
[optimizer]
lr = 0.05
arguments = { momentum = 0.9, weight_decay = 1e-3 }
[schedule]
warmup_epochs = 1.5
build = "StepLR"
arguments = { step_size = 1, gamma = 0.9 }
[method]
name = "hierarchical"
every = 3
[training]
epochs = 1
"""


class Doubled(nn.Module):
    """In float64, so that what differs is not the order of additions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.double()


def steady() -> nn.Module:
    """The same from every thread: they share torch's own chance."""
    net = nn.Sequential(
        Doubled(), nn.Flatten(), nn.Linear(36, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10)
    )
    net = net.double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 4)
    return net


def a_config(folder: Path) -> Config:
    (folder / "job.toml").write_text(JOB)
    return load(folder / "job.toml")


def real_distances(config: Config, world: Transport) -> list[float]:
    """Of the job that `config` describes."""
    parts = assemble(config, form(world, groups=4), "job.toml")
    per_step = parts.steps_per_epoch
    distances: list[float] = []
    while len(distances) < MEETINGS:
        for x, y in parts.loader:
            parts.optimizer.zero_grad()
            cross_entropy(parts.model(x), y).backward()
            parts.optimizer.step()
            if parts.scheduler is not None and parts.optimizer.t % per_step == 0:
                parts.scheduler.step()
            distances += [parts.optimizer.notes["distance"]] if "distance" in parts.optimizer.notes else []
        parts.sampler.set_epoch(parts.optimizer.t // per_step)
    return distances[:MEETINGS]


def virtual_distances(config: Config, world: Transport, P: int, K: int) -> list[float]:
    groups = virtual_groups(config, P, K, world)
    distances = []
    for _ in range(MEETINGS):
        for _ in range(EVERY):
            groups.update()
        distances.append(groups.meet())
    return distances


def compare(world: Transport, folder: str) -> None:
    """The real job on eight ranks; then its virtual groups on one, two and three of them."""
    if world.rank == 0:
        make_store(Path(folder) / "small.h5", train=97)
        a_config(Path(folder))
    world.barrier()
    config = load(Path(folder) / "job.toml")
    expected = real_distances(config, world)
    assert min(expected) > 0
    for hosts in (1, 2, 3):
        some = world.split(int(world.rank < hosts), world.rank)
        if world.rank < hosts:
            assert virtual_distances(config, some, 4, 2) == pytest.approx(expected, rel=1e-6)


@pytest.mark.ranks
def test_distances_are_those_of_the_real_job(run, tmp_path):
    run(8, compare, str(tmp_path))


@pytest.fixture
def config(tmp_path: Path) -> Config:
    make_store(tmp_path / "small.h5", train=97)
    return a_config(tmp_path)


def test_the_host_makes_no_difference_to_chance(config: Config) -> None:
    """Dropout and augmentation of a virtual rank are its own, whoever trains before it."""
    noisy = replace(config, model=replace(config.model, build="tuning.test_replicas:noisy"))
    four = threads.run(1, lambda world: virtual_distances(noisy, world, 4, 1))[0]
    again = threads.run(1, lambda world: virtual_distances(noisy, world, 4, 1))[0]
    assert four == again
    groups = threads.run(1, lambda world: virtual_groups(noisy, 4, 1, world))[0]
    groups.update()
    backwards = threads.run(1, lambda world: virtual_groups(noisy, 4, 1, world))[0]
    backwards.trainees = backwards.trainees[::-1]
    backwards.update()
    for one, other in zip(groups.trainees, backwards.trainees[::-1], strict=True):
        for p, q in zip(one.model.parameters(), other.model.parameters(), strict=True):
            assert torch.equal(p, q)


def noisy() -> nn.Module:
    return nn.Sequential(steady(), nn.Dropout(0.3))


def test_models_stay_apart_after_a_meeting(config: Config) -> None:
    groups = threads.run(1, lambda world: virtual_groups(config, 2, 1, world))[0]
    groups.update()
    groups.meet()
    one, other = (trainee.model for trainee in groups.trainees)
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))
    with torch.no_grad():
        next(one.parameters()).add_(1)
    assert not torch.equal(next(one.parameters()), next(other.parameters()))


def test_a_loss_that_is_not_finite(config: Config) -> None:
    groups = threads.run(1, lambda world: virtual_groups(config, 2, 1, world))[0]
    with torch.no_grad():
        next(groups.trainees[1].model.parameters()).fill_(float("nan"))
    with pytest.raises(UserError, match="the loss with 2 groups is nan"):
        groups.update()
