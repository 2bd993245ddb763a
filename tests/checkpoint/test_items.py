"""Objects, generators and values of a script that do not match what was saved under their names."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel

import hpcsgd
from hpcsgd.comm import Communicator, threads
from hpcsgd.core.topology import form
from hpcsgd.errors import JobError

Optimizer = hpcsgd.DistributedOptimizer


class Meter:
    """An object with state, as a script may define one."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {"loss": [0.5]}

    def state_dict(self) -> dict[str, Any]:
        return self.seen

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = {"loss": state["loss"]}


class MeterOfMine(Meter):
    pass


class Broken(Meter):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("of mine")


Broken.__qualname__ = "Meter"


def optimizer_of(world: Communicator) -> Optimizer:
    net = nn.Linear(3, 2)
    return Optimizer(optim.SGD(net.parameters(), lr=0.1), net, form(world, 1), hpcsgd.bsp())


def step_lr(optimizer: Optimizer) -> Any:
    return lr_scheduler.StepLR(optimizer, 2)


LOADED: dict[str, tuple[Callable[[Optimizer], Any], Callable[[Optimizer], Any], str]] = {
    "another shape": (
        lambda _: nn.Linear(3, 2), lambda _: nn.Linear(3, 4),
        "x does not fit into the Linear that load.. was given: RuntimeError: .* size mismatch for weight",
    ),
    "another prefix": (
        lambda _: nn.Linear(3, 2), lambda _: AveragedModel(nn.Linear(3, 2)), "x does not fit into the Av",
    ),
    "a scheduler for a module": (
        lambda _: nn.Linear(3, 2), step_lr, "x was a Module, and load.. was given another class, StepLR",
    ),
    "another scheduler": (
        lambda o: lr_scheduler.ExponentialLR(o, 0.9), step_lr, "x was a ExponentialLR, .* class, StepLR",
    ),
    "an optimizer for a module": (
        lambda _: nn.Linear(3, 2), lambda _: optim.SGD(nn.Linear(3, 2).parameters(), lr=1), "x was a Module",
    ),
    "another optimizer": (
        lambda _: optim.SGD(nn.Linear(3, 2).parameters(), lr=1),
        lambda _: optim.Adam(nn.Linear(3, 2).parameters()), "x was a SGD, .* another class, Adam",
    ),
    "an optimizer of more groups": (
        lambda _: optim.SGD(nn.Linear(3, 2).parameters(), lr=1),
        lambda _: optim.SGD([{"params": [nn.Parameter(torch.ones(1))]} for _ in range(2)], lr=1),
        "x does not fit into the SGD .* ValueError: .* number of parameter groups",
    ),
    "another library's generator": (
        lambda _: torch.Generator(), lambda _: np.random.default_rng(),
        "x was a torch Generator, and load.. was given another class, numpy Generator",
    ),
    "a generator of Python": (lambda _: random.Random(), lambda _: torch.Generator(), "x was a random Gen"),
    "another generator of NumPy": (
        lambda _: np.random.default_rng(), lambda _: np.random.Generator(np.random.MT19937()),
        "x does not fit into the Generator .* ValueError",
    ),
    "the class above": (lambda _: MeterOfMine(), lambda _: Meter(), "x was a MeterOfMine, .* class, Meter"),
}  # fmt: skip


@pytest.mark.parametrize("name", LOADED)
def test_what_does_not_fit_is_reported(tmp_path: Path, name: str) -> None:
    saved, loaded, message = LOADED[name]

    def body(world: Communicator) -> None:
        optimizer = optimizer_of(world)
        hpcsgd.save(tmp_path, optimizer, x=saved(optimizer))
        with pytest.raises(JobError, match=f"step-00000000: {message}") as told:
            hpcsgd.load(tmp_path, optimizer, x=loaded(optimizer))
        assert "Traceback" not in str(told.value)

    threads.run(2, body)


def test_what_a_class_of_the_script_raises_keeps_its_traceback(tmp_path: Path) -> None:
    def body(world: Communicator) -> None:
        optimizer = optimizer_of(world)
        hpcsgd.save(tmp_path, optimizer, x=Meter())
        with pytest.raises(JobError) as told:
            hpcsgd.load(tmp_path, optimizer, x=Broken())
        assert 'raise KeyError("of mine")' in str(told.value)
        assert "step-00000000: x was put back into a Broken" in str(told.value)

    threads.run(2, body)


def test_a_derived_class_takes_the_state(tmp_path: Path) -> None:
    def body(world: Communicator) -> None:
        optimizer, meter = optimizer_of(world), Meter()
        meter.seen = {"loss": [world.rank]}
        hpcsgd.save(tmp_path, optimizer, x=meter)
        found = MeterOfMine()
        hpcsgd.load(tmp_path, optimizer, x=found)
        assert found.seen == {"loss": [world.rank]}

    threads.run(2, body)


class Migrating(nn.Module):
    """A module that multiplies by ten what its version 1 saved, by torch's convention for versions."""

    _version = 2

    def __init__(self, value: float) -> None:
        super().__init__()
        self.register_buffer("x", torch.full((20,), value))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *others: Any) -> None:
        if metadata.get("version", 1) < 2:
            state[f"{prefix}x"] = state[f"{prefix}x"] * 10
        super()._load_from_state_dict(state, prefix, metadata, *others)


@pytest.mark.parametrize("ranks", [1, 2])
def test_modules_know_the_version_that_they_read(tmp_path: Path, ranks: int) -> None:
    """The version is also known if the state is the mean of what two ranks saved."""

    def first(world: Communicator) -> None:
        hpcsgd.save(tmp_path, optimizer_of(world), x=nn.Sequential(Migrating(1.0 + 2 * world.rank)))

    def second(world: Communicator) -> None:
        found = nn.Sequential(Migrating(0.0))
        hpcsgd.load(tmp_path, optimizer_of(world), x=found)
        expected = 2.0 if ranks == 1 else 1.0 + 2 * world.rank
        assert found.state_dict()["0.x"].unique().tolist() == [expected]

    threads.run(2, first)
    threads.run(ranks, second)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: nn.Linear, "x: the class Linear cannot be saved in a checkpoint"),
    (random.SystemRandom, "x: a SystemRandom has no state that could be saved: give a random.Random"),
    (lambda: torch.ones(2, device="meta"), "x: a tensor on the meta device has no values"),
    (lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "x: a NestedTensor cannot"),
])  # fmt: skip
def test_what_cannot_be_saved_is_named(tmp_path: Path, make: Callable[[], Any], message: str) -> None:
    def body(world: Communicator) -> None:
        value = make()
        within: list[Any] = []
        within.append(within)
        with pytest.raises(JobError, match=message) as told:
            hpcsgd.save(tmp_path, optimizer_of(world), x=value)
        assert "Traceback" not in str(told.value)
        with pytest.raises(
            JobError, match="x: it contains itself, or is nested too deeply, and cannot be saved"
        ):
            hpcsgd.save(tmp_path, optimizer_of(world), x=within)

    threads.run(2, body)
    assert not any(tmp_path.iterdir())
