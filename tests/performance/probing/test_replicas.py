"""Virtual groups perform the training of real ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hpcsgd.comm import Communicator, threads
from hpcsgd.config.schema import Config, load
from hpcsgd.core.topology import form
from hpcsgd.engine.lr import rates_in_force
from hpcsgd.performance.measuring.workload import Workload
from hpcsgd.performance.probing.idle import InMemory, Offload, OnDisk, PinnedMemory
from hpcsgd.performance.probing.replicas import DivergedError
from hpcsgd.performance.probing.virtual import virtual_groups
from hpcsgd.train.training_setup import assemble
from performance.probing import drawing
from train.launches import make_store

EVERY, SYNCS = 3, 5
JOB = """
seed = 4
[parallel]
groups = 4
[data]
path = "small.h5"
group_batch_size = 6
[model]
name = "performance.probing.test_replicas:steady"
[optimizer]
lr = 0.05
arguments = { momentum = 0.9, weight_decay = 1e-3 }
[lr_schedule]
scaling = "linear"
warmup_epochs = 1.5
name = "StepLR"
arguments = { step_size = 1, gamma = 0.9 }
[method]
name = "hierarchical"
sync_every = 3
[training]
epochs = 1
"""


class Doubled(nn.Module):
    """A conversion to float64, so that the order of additions makes no visible difference."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.double()


def steady() -> nn.Module:
    """Return the same model in every thread; threads share torch's own generator."""
    net = nn.Sequential(
        Doubled(), nn.Flatten(), nn.Linear(36, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10)
    )
    net = net.double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 4)
    return net


class Turned(nn.Module):
    """A model with a complex weight, and a complex buffer that depends on the samples."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(19, 10, dtype=torch.complex64) / 8)
        self.register_buffer("mean", torch.zeros(19, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.fft.rfft(x.flatten(1), norm="ortho")
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * z.mean(0)
        return (z @ self.weight).imag


def a_config(folder: Path) -> Config:
    (folder / "job.toml").write_text(JOB)
    return load(folder / "job.toml")


def real_distances(config: Config, world: Communicator) -> list[float]:
    """Return the distances of the job that `config` describes."""
    parts = assemble(config, form(world, groups=4), "job.toml")
    per_step = parts.steps_per_epoch
    distances: list[float] = []
    while len(distances) < SYNCS:
        for x, y in (parts.vary(*samples) for samples in parts.loader):
            parts.optimizer.zero_grad()
            cross_entropy(parts.model(x), y).backward()
            parts.optimizer.step()
            if parts.scheduler is not None and parts.optimizer.t % per_step == 0:
                parts.scheduler.step()
            distances += (
                [parts.optimizer.metrics["distance"]] if "distance" in parts.optimizer.metrics else []
            )
        parts.sampler.set_epoch(parts.optimizer.t // per_step)
    return distances[:SYNCS]


def virtual_distances(config: Config, world: Communicator, P: int, K: int) -> list[float]:
    groups = virtual_groups(config, P, K, world)
    distances = []
    for _ in range(SYNCS):
        groups.train(EVERY)
        distances.append(groups.synchronize())
    return distances


def shaken(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return x + torch.rand(x.shape, generator=generator)


def noisy() -> nn.Module:
    return nn.Sequential(steady(), nn.Dropout(0.3))


def by_chance(config: Config, of: str) -> Config:
    """Add random numbers to the transform, to the model, or to neither."""
    if of == "transform":
        return replace(
            config, data=replace(config.data, transform="performance.probing.test_replicas:shaken")
        )
    if of == "dropout":
        return replace(config, model=replace(config.model, name="performance.probing.test_replicas:noisy"))
    return config


def compared(world: Communicator, folder: str, chance: str) -> list[list[float]]:
    """Return the distances of the real job on eight ranks, then those of its virtual groups.

    The virtual groups run on one, two and three hosts. A rank that is not a host has only some of these.
    """
    if world.rank == 0:
        make_store(Path(folder) / "small.h5", train=97)
        a_config(Path(folder))
    world.barrier()
    config = by_chance(load(Path(folder) / "job.toml"), chance)
    found = [real_distances(config, world)]
    for hosts in (1, 2, 3):
        some = world.split(int(world.rank < hosts), world.rank)
        if world.rank < hosts:
            found.append(virtual_distances(config, some, 4, 2))
    return found


@pytest.mark.slow
@pytest.mark.threads(unless={"chance": "dropout"})
@pytest.mark.ranks(8)
@pytest.mark.parametrize(
    "chance",
    [
        "none",
        "transform",
        pytest.param("dropout", marks=pytest.mark.processes),  # threads share the generator of their process
    ],
)
def test_distances_are_those_of_the_real_job(run, tmp_path, chance):
    """This holds with random numbers, too: virtual rank r draws the same as the real one."""
    expected, *virtual = run(8, compared, str(tmp_path), chance)[0]
    assert min(expected) > 0
    assert virtual == [pytest.approx(expected, rel=1e-6)] * 3


@pytest.fixture
def config(tmp_path: Path) -> Config:
    make_store(tmp_path / "small.h5", train=97)
    return a_config(tmp_path)


def test_the_host_makes_no_difference_to_chance(config: Config) -> None:
    """Dropout and augmentation of a virtual rank do not depend on which rank trains before it."""
    chancy = by_chance(config, "dropout")
    four = threads.run(1, lambda world: virtual_distances(chancy, world, 4, 1))[0]
    again = threads.run(1, lambda world: virtual_distances(chancy, world, 4, 1))[0]
    assert four == again
    groups = threads.run(1, lambda world: virtual_groups(chancy, 4, 1, world))[0]
    groups.train(1)
    backwards = threads.run(1, lambda world: virtual_groups(chancy, 4, 1, world))[0]
    backwards.trainees = backwards.trainees[::-1]
    backwards.train(1)
    for one, other in zip(groups.trainees, backwards.trainees[::-1], strict=True):
        for p, q in zip(one.model.parameters(), other.model.parameters(), strict=True):
            assert torch.equal(p, q)


def test_every_virtual_rank_has_a_chance_of_its_own(config: Config) -> None:
    """Rank r begins with seed + 1 + r, as in a real run, and continues its generators in the next step."""
    drawing.drawn.clear()
    config = replace(
        config,
        data=replace(config.data, transform="performance.probing.drawing:transform"),
        model=replace(config.model, name="performance.probing.drawing:model"),
    )
    groups = threads.run(1, lambda world: virtual_groups(config, 3, 2, world))[0]
    groups.train(2)
    ranks = [drawing.draws(config.seed + 1 + rank, 2) for rank in range(6)]
    assert drawing.drawn == [ranks[2 * g + j][t] for g in range(3) for t in range(2) for j in range(2)]
    assert len(set(drawing.drawn)) == 12


def test_models_are_laid_out_as_in_the_real_job(config: Config) -> None:
    images = replace(config.model, name="cnn", arguments={"shape": [1, 6, 6], "classes": 10})
    config = replace(config, model=images, training=replace(config.training, channels_last=True))
    groups = threads.run(1, lambda world: virtual_groups(config, 2, 1, world))[0]
    for trainee in groups.trainees:
        filters = [p for p in trainee.model.parameters() if p.dim() == 4]
        assert all(p.is_contiguous(memory_format=torch.channels_last) for p in filters)
        assert not all(p.is_contiguous() for p in filters)


def test_models_stay_separate_after_a_synchronization(config: Config) -> None:
    groups = threads.run(1, lambda world: virtual_groups(config, 2, 1, world))[0]
    groups.train(1)
    groups.synchronize()
    one, other = (trainee.model for trainee in groups.trainees)
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))
    with torch.no_grad():
        next(one.parameters()).add_(1)
    assert not torch.equal(next(one.parameters()), next(other.parameters()))


def test_several_steps_at_once_are_as_many_steps(config: Config) -> None:
    def trained(world: Communicator, turns: list[int]) -> tuple[float, float]:
        groups = virtual_groups(config, 3, 2, world)
        losses = [groups.train(steps) * steps for steps in turns]
        return sum(losses) / sum(turns), groups.synchronize()

    (at_once,) = threads.run(1, trained, [5])
    (one_by_one,) = threads.run(1, trained, [1, 1, 2, 1])
    assert at_once[0] == pytest.approx(one_by_one[0])
    assert at_once[1] == one_by_one[1]


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("elsewhere", [InMemory, OnDisk])
def test_where_models_wait_makes_no_difference(
    hosts: int, elsewhere: type, config: Config, tmp_path: Path
) -> None:
    config = replace(config, optimizer=replace(config.optimizer, name="AdamW", arguments={}))

    def trained(world: Communicator, idle: Offload) -> list[tuple[float, float, float]]:
        groups = virtual_groups(config, 4, 1, world, idle=idle)
        return [(groups.train(2), groups.synchronize(), groups.loss()) for _ in range(3)]

    def place() -> Offload:
        return OnDisk(tmp_path) if elsewhere is OnDisk else InMemory()

    expected = threads.run(1, lambda world: trained(world, InMemory()))[0]
    for found in threads.run(hosts, lambda world: trained(world, place())):
        assert found == [pytest.approx(row, rel=1e-9) for row in expected]


def test_idle_models_take_no_memory(config: Config, tmp_path: Path) -> None:
    groups = threads.run(1, lambda world: virtual_groups(config, 2, 1, world, idle=OnDisk(tmp_path)))[0]
    groups.train(1)
    for trainee in groups.trainees:
        assert sum(x.untyped_storage().nbytes() for x in trainee.tensors()) == 0
        assert all(p.grad is None for p in trainee.model.parameters())
    assert not list(tmp_path.glob("idle-*"))  # no file may be left behind


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_loss_that_is_not_finite_is_heard_everywhere(hosts: int, config: Config) -> None:
    def spoilt(world: Communicator) -> str:
        groups = virtual_groups(config, 2, 1, world)
        if world.rank == world.size - 1:
            with torch.no_grad():
                next(groups.trainees[-1].model.parameters()).fill_(float("nan"))
        with pytest.raises(DivergedError) as caught:
            groups.train(2)
        return str(caught.value)

    for message in threads.run(hosts, spoilt):
        assert message.startswith("the loss with 2 groups is nan")


def test_the_averaged_model_is_the_mean_and_leaves_no_trace(config: Config) -> None:
    groups = threads.run(1, lambda world: virtual_groups(config, 2, 1, world))[0]
    groups.train(2)
    before = [{k: v.clone() for k, v in t.model.state_dict().items()} for t in groups.trainees]
    with groups.averaged() as model:
        assert not model.training
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                mean = (before[0][name] + before[1][name]) / 2
                assert torch.allclose(value, mean, rtol=1e-12, atol=1e-12), name
    for trainee, state in zip(groups.trainees, before, strict=True):
        assert trainee.model.training
        assert all(torch.equal(value, state[name]) for name, value in trainee.model.state_dict().items())


def test_complex_numbers_are_two_reals(config: Config) -> None:
    """A complex number counts as two reals in models, in their mean and in `hpcsgd measure`."""
    config = replace(config, model=replace(config.model, name="performance.probing.test_replicas:Turned"))
    assert threads.run(1, lambda world: Workload(config, "job.toml", world))[0].numel == 2 * 19 * 10
    groups = threads.run(1, lambda world: virtual_groups(config, 2, 1, world))[0]
    groups.train(2)
    weights, buffers = (
        torch.stack([getattr(trainee.model, name).detach().clone() for trainee in groups.trainees])
        for name in ("weight", "mean")
    )
    with groups.averaged() as model:
        torch.testing.assert_close(model.weight.detach(), weights.mean(0))
        torch.testing.assert_close(model.mean, buffers.mean(0))
    apart = torch.stack([torch.view_as_real(w - weights.mean(0)).norm() for w in weights]).mean().item()
    assert groups.synchronize() == pytest.approx(apart, rel=1e-5)
    for trainee in groups.trainees:
        torch.testing.assert_close(trainee.model.weight.detach(), weights.mean(0))


@pytest.mark.slow
@pytest.mark.usefixtures("far_device")
@pytest.mark.parametrize("elsewhere", [InMemory, PinnedMemory, OnDisk])
def test_on_a_device(elsewhere: type, config: Config, tmp_path: Path) -> None:
    idle = OnDisk(tmp_path) if elsewhere is OnDisk else elsewhere()

    def trained(world: Communicator, idle: Offload, device: torch.device) -> list[tuple[float, float, float]]:
        groups = virtual_groups(config, 4, 1, world, idle=idle, device=device)
        return [(groups.train(2), groups.synchronize(), groups.loss()) for _ in range(3)]

    expected = threads.run(1, trained, InMemory(), torch.device("cpu"))[0]
    found = threads.run(1, trained, idle, torch.device("far", 0))[0]
    assert found == [pytest.approx(row, rel=1e-6) for row in expected]


@pytest.mark.parametrize(("scaling", "first"), [("linear", 1 / 3), ("none", 1 / 9), ("none without", 1.0)])
def test_the_ramp_of_a_probe_replaces_the_warm_up_of_scaled_rates_alone(
    config: Config, scaling: str, first: float
) -> None:
    """The first update uses the expected factor; 1.5 epochs are 9 steps.

    `first` is its factor with 3 groups and a ramp of 2 steps.
    """
    epochs = 0.0 if scaling == "none without" else 1.5
    schedule = replace(config.lr_schedule, scaling=scaling.split(maxsplit=1)[0], warmup_epochs=epochs)
    config = replace(config, lr_schedule=schedule)
    groups = threads.run(1, lambda world: virtual_groups(config, 3, 1, world, warm_up_steps=2))[0]
    optimizer = groups.trainees[0].optimizer
    full = optimizer.param_groups[0]["lr"]
    assert rates_in_force(optimizer)[0] / full == pytest.approx(first)
