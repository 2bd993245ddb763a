"""Damaged checkpoints never load wrong numbers: the previous one loads, or one line names the damage."""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from checkpoint.test_snapshot import load, save
from hpcsgd.checkpoint import Checkpoints, folder
from hpcsgd.comm import Communicator, threads
from hpcsgd.core.topology import form
from hpcsgd.errors import JobError
from soak.conftest import Seeds
from soak.sizes import cases
from trainings import Training

METHODS = ("hierarchical", "osgp", "sparseloco", "ad_psgd")
"""Methods that keep different kinds of state."""
SAVED = (2, 3)
SHAPES = [(2, 2), (2, 2), (1, 2), (4, 1)]
"""The (P, K) on which training resumes; the checkpoints are saved on the first one."""
State = dict[str, Tensor]


@dataclass
class Runs:
    """A folder with two checkpoints per method, and the states that undamaged ones restore."""

    folder: Path
    whole: dict[tuple[str, int, tuple[int, int]], list[State]]

    def expected(self, method: str, step: int, shape: tuple[int, int]) -> list[State]:
        key = method, step, shape
        if key not in self.whole:
            alone = self.folder / f"{method}-{step}"
            self.whole[key] = [state for _, state in restored(alone, method, shape)]
        return self.whole[key]


def saved_by(world: Communicator, path: Path, method: str) -> None:
    training = Training(form(world, groups=2), "AdamW", method)
    for step in SAVED:
        training.steps(step - training.t)
        save(training, path)


def restored(path: Path, method: str, shape: tuple[int, int]) -> list[tuple[int, State]]:
    """Return, for each rank, the step and the complete state after the checkpoint is loaded."""
    P, K = shape

    def rank(world: Communicator) -> tuple[int, State]:
        training = Training(form(world, groups=P), "AdamW", method, seed=1)
        load(training, path)
        return training.t, training.everything()

    return threads.run(P * K, rank)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    made = tmp_path_factory.mktemp("runs")
    for method in METHODS:
        threads.run(4, saved_by, made / method, method)
        for step in SAVED:
            title = f"step-{step:08d}"
            shutil.copytree(made / method / title, made / f"{method}-{step}" / title)
    return Runs(made, {})


def cut_off(data: bytes, chance: random.Random) -> bytes:
    return data[: chance.choice([0, len(data) - 1, chance.randrange(len(data))])]


def flipped(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice([1, 1, 8, 64])):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def overwritten(data: bytes, chance: random.Random) -> bytes:
    """Overwrite a block with zeros or random bytes."""
    at, size = chance.randrange(len(data)), chance.choice([1, 16, 512, 4096])
    block = chance.choice([bytes(size), chance.randbytes(size)])
    return data[:at] + block + data[at + size :]


def prolonged(data: bytes, chance: random.Random) -> bytes:
    return data + chance.choice([b"\0", b"}", data])


DAMAGES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    cut_off, cut_off, flipped, flipped, overwritten, prolonged,
)  # fmt: skip


def damage(folder: Path, chance: random.Random) -> bool:
    """Damage one or two files of a checkpoint, and return True if that changed any byte."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    changed = False
    for file in chance.sample(files, chance.choice([1, 1, 2])):
        before = file.read_bytes()
        file.write_bytes(after := chance.choice(DAMAGES)(before, chance))
        changed |= before != after
    return changed


def attempt(runs: Runs, path: Path, seed: int, said: Callable[[], str]) -> None:
    chance = random.Random(f"checkpoint {seed}")
    method, shape = chance.choice(METHODS), chance.choice(SHAPES)
    shutil.copytree(runs.folder / method, path)
    newest = path / f"step-{SAVED[1]:08d}"
    both = chance.random() < 0.2
    changed = damage(newest, chance)
    if both:
        damage(path / f"step-{SAVED[0]:08d}", chance)
    try:
        found = restored(path, method, shape)
    except JobError as error:
        told = str(error)
        assert both
        assert told == f"{path}: all checkpoints are damaged: {newest.name}, step-{SAVED[0]:08d}"
        return
    step = found[0][0]
    if step == SAVED[0]:
        assert changed
        assert f"checkpoint {newest.name} is damaged" in said()
    for (t, state), other in zip(found, runs.expected(method, step, shape), strict=True):
        assert t == step
        assert state.keys() == other.keys()
        assert all(torch.equal(value, other[name]) for name, value in state.items())


@pytest.mark.slow
@cases(some=6, every=200)
def test_damage_is_passed_over_or_reported(
    runs: Runs, seeds: Seeds, cases: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def case(seed: int) -> None:
        caplog.clear()
        path = tmp_path / str(seed)
        with caplog.at_level(logging.WARNING):
            attempt(runs, path, seed, lambda: caplog.text)
        shutil.rmtree(path)

    seeds.each(cases, case)


def test_numbers_that_nobody_checks_are_found(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the comparison of checksums, some case must load wrong numbers or fail in another way."""
    monkeypatch.setattr(folder, "differs", lambda *_: None)

    def fails(seed: int) -> bool:
        try:
            attempt(runs, tmp_path / str(seed), seed, lambda: caplog.text)
        except Exception:  # noqa: BLE001 - any exception shows that the damage was noticed
            return True
        return False

    assert any(fails(seed) for seed in range(10))


def test_where_nothing_is_damaged_the_newest_is_taken(runs: Runs) -> None:
    def found(world: Communicator) -> int:
        saved = Checkpoints(runs.folder / METHODS[0], form(world)).newest()
        assert saved is not None
        return saved.step

    assert threads.run(1, found) == [SAVED[1]]
