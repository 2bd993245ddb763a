"""Checkpoints of training on a device: training resumes with the same bits, also on the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, optim

import hpcsgd
from far.ranks import PATTERNS, explicitly
from hpcsgd.checkpoint import Checkpoints, capture, restore
from hpcsgd.comm import Communicator, threads
from hpcsgd.core.topology import form
from trainings import Training

pytestmark = pytest.mark.usefixtures("far_device")

SAVED, LAST = 4, 7
P, K = 2, 2
HOST = torch.device("cpu")
SETTINGS: dict[str, tuple[str, Any]] = {
    "AdamW": ("AdamW", "hierarchical"),
    "whole tensors": ("whole tensors", "hierarchical"),
    "numbers on the host and beside the parameters": ("NAdam", "hierarchical"),
    "messages under way": ("momentum", lambda: hpcsgd.osgp(overlap_steps=2)),
    "an outer optimizer": ("momentum", lambda: hpcsgd.diloco(2, outer=lambda x: optim.Adam(x, lr=0.1))),
    "sums since the meeting": ("plain", lambda: hpcsgd.sasgd(3)),
    "squared norms": ("momentum", lambda: hpcsgd.selsync(0.05)),
    "losses": ("momentum", lambda: hpcsgd.adacomm(2, adapt_every=2)),
}

SOME = ["AdamW", "whole tensors", "messages under way"]
NEVER_TWICE_ALIKE: dict[str, tuple[str, Any]] = {
    "a server for groups that wait": ("momentum", lambda: hpcsgd.ssp(max_staleness=1)),
    "a server for groups that do not": ("momentum", hpcsgd.async_sgd),
    "partners drawn by chance": ("momentum", hpcsgd.ad_psgd),
}
"""Settings in which the order of ranks is random: the saved state is exact, but later steps differ."""


def save(training: Training, folder: Path) -> None:
    state = capture(
        training.optimizer, shared={}, own={"rank": torch.tensor(training.optimizer.topology.rank)}
    )
    Checkpoints(folder, training.optimizer.topology).write(training.t, state)


def load(training: Training, folder: Path) -> None:
    saved = Checkpoints(folder, training.optimizer.topology).newest()
    assert saved is not None
    restore(saved, training.optimizer)
    training.t = training.optimizer.t


def whole(world: Communicator, setting: str, folder: Path, device: torch.device = HOST) -> dict[str, Tensor]:
    training = Training(form(world, P), *(SETTINGS | NEVER_TWICE_ALIKE)[setting], device=device)
    training.steps(SAVED)
    save(training, folder)
    training.steps(LAST - SAVED)
    return training.everything()


def resumed(
    world: Communicator, setting: str, folder: Path, device: torch.device = HOST
) -> dict[str, Tensor]:
    training = Training(form(world, P), *SETTINGS[setting], seed=1, device=device)
    load(training, folder)
    training.steps(LAST - training.t)
    return training.everything()


def held(world: Communicator, setting: str, folder: Path, device: torch.device = HOST) -> dict[str, Tensor]:
    """Return the state of a training that has loaded the checkpoint."""
    training = Training(form(world, P), *(SETTINGS | NEVER_TWICE_ALIKE)[setting], seed=1, device=device)
    load(training, folder)
    return training.everything()


def assert_same(ranks: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    for mine, theirs in zip(ranks, expected, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            assert value.isfinite().all(), name  # NaN does not compare equal to itself
            assert torch.equal(value, theirs[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_it_goes_on_with_the_same_bits(setting: str, tmp_path: Path) -> None:
    expected = threads.run(P * K, explicitly(whole), setting, tmp_path)
    assert_same(threads.run(P * K, explicitly(resumed), setting, tmp_path), expected)


@pytest.mark.slow
@pytest.mark.parametrize("setting", [*SOME, *NEVER_TWICE_ALIKE])
def test_the_host_finds_what_a_device_saved(setting: str, tmp_path: Path) -> None:
    threads.run(P * K, explicitly(whole), setting, tmp_path)
    there = threads.run(P * K, explicitly(held), setting, tmp_path)
    assert_same(threads.run(P * K, held, setting, tmp_path), there)


@pytest.mark.slow
@pytest.mark.parametrize("setting", [*SOME, *NEVER_TWICE_ALIKE])
def test_a_device_finds_what_the_host_saved(setting: str, tmp_path: Path) -> None:
    threads.run(P * K, whole, setting, tmp_path)
    here = threads.run(P * K, held, setting, tmp_path)
    assert_same(threads.run(P * K, explicitly(held), setting, tmp_path), here)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["default stream slow", "all others slow"])
def test_nothing_is_written_before_it_is_there(pattern: str, tmp_path: Path) -> None:
    for folder, delays in (("quick", PATTERNS["none"]), ("slow", PATTERNS[pattern])):
        threads.run(P * K, explicitly(whole, delays), "AdamW", tmp_path / folder)
    quick, slow = (threads.run(P * K, held, "AdamW", tmp_path / folder) for folder in ("quick", "slow"))
    assert_same(slow, quick)
