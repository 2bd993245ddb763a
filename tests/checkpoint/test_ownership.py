"""`hpcsgd.save` removes or replaces only checkpoints that its training has saved or loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import hpcsgd
from hpcsgd.comm import Communicator, threads
from hpcsgd.core.topology import form
from hpcsgd.errors import JobError, UserError


def made(world: Communicator, seed: int = 0) -> hpcsgd.DistributedOptimizer:
    net = nn.Linear(3, 2)
    with torch.no_grad():
        net.weight.fill_(seed)
    inner = optim.SGD(net.parameters(), lr=0.1)
    return hpcsgd.DistributedOptimizer(inner, net, form(world, 1), hpcsgd.bsp())


def steps(optimizer: hpcsgd.DistributedOptimizer, *, until: int) -> None:
    while optimizer.t < until:
        optimizer.model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def train(world: Communicator, folder: Path, *at: int, load: bool = False) -> None:
    optimizer = made(world)
    if load:
        hpcsgd.load(folder, optimizer)
    for step in at:
        steps(optimizer, until=step)
        hpcsgd.save(folder, optimizer)


def names(folder: Path) -> list[str]:
    """Return all names except those of files with tensors and of the lock file."""
    paths = (path.relative_to(folder) for path in folder.rglob("*"))
    return sorted(str(path) for path in paths if path.suffix not in (".h5", ".lock"))


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def message_of(world: Communicator, function: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(JobError) as caught:
        function(world, *args)
    return str(caught.value)


@pytest.mark.parametrize("step", [1, 5, 6, 9])
@pytest.mark.ranks(2)
def test_checkpoints_of_another_training_stay(run: Callable[..., Any], tmp_path: Path, step: int) -> None:
    """Checkpoints of another training remain, whether their steps are later, the same or earlier."""

    def body(world: Communicator) -> str:
        folder = Path(world.gather_objects(str(tmp_path))[0])
        train(world, folder, 5, 6)
        before = content(folder)
        message = message_of(world, train, folder, step)
        assert content(folder) == before
        return message

    for message in run(2, body):
        assert "has step-00000006, step-00000005, which this training has neither saved nor loaded" in message
        assert "call hpcsgd.load before training to go on from there, give a folder of its own" in message


def test_who_has_loaded_goes_on_in_the_folder(tmp_path: Path) -> None:
    threads.run(2, train, tmp_path, 5, 6)
    threads.run(2, lambda world: train(world, tmp_path, 7, load=True))
    assert names(tmp_path)[::2] == ["step-00000006", "step-00000007"]


def test_what_was_passed_over_as_damaged_is_removed(tmp_path: Path) -> None:
    threads.run(2, train, tmp_path, 5, 8)
    (tmp_path / "step-00000008" / "rank-00001.h5").unlink()
    threads.run(2, lambda world: train(world, tmp_path, 6, load=True))
    assert names(tmp_path)[::2] == ["step-00000005", "step-00000006"]


def test_another_folder_than_that_which_was_loaded_is_looked_at_too(tmp_path: Path) -> None:
    threads.run(2, train, tmp_path / "a", 5)
    threads.run(2, train, tmp_path / "b", 7)

    def body(world: Communicator) -> None:
        optimizer = made(world)
        hpcsgd.load(tmp_path / "a", optimizer)
        hpcsgd.save(tmp_path / "c", optimizer)
        with pytest.raises(JobError, match="b has step-00000007, which this training"):
            hpcsgd.save(tmp_path / "b", optimizer)

    threads.run(2, body)
    assert names(tmp_path / "c")[0] == "step-00000005"


def test_folders_of_others_stay(tmp_path: Path) -> None:
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001" / "thesis.txt").write_text("x")
    (tmp_path / "step-00000099").mkdir()
    (tmp_path / "step-00000099" / "manifest.txt").write_text("x")
    (tmp_path / ".writing-letters").mkdir()
    before = names(tmp_path)
    (message, _) = threads.run(2, message_of, train, tmp_path, 1)
    assert "step-00000001 is no checkpoint: give another folder, or remove it" in message
    threads.run(2, train, tmp_path, 2, 3, 4)
    ours = [f"step-0000000{step}{end}" for step in (3, 4) for end in ("", "/manifest.json")]
    assert names(tmp_path) == sorted([*before, *ours])


def test_what_somebody_has_put_into_a_checkpoint_stays(tmp_path: Path) -> None:
    def body(world: Communicator) -> None:
        optimizer = made(world)
        for step in range(1, 5):
            steps(optimizer, until=step)
            hpcsgd.save(tmp_path, optimizer)
            if step == 1 and world.rank == 0:
                (tmp_path / "step-00000001" / "notes.txt").write_text("the best one")

    threads.run(2, body)
    assert names(tmp_path)[::2][:2] == ["step-00000001", "step-00000001/notes.txt"]
    assert not (tmp_path / "step-00000002").exists()


def test_two_optimizers_are_saved_by_one_call(tmp_path: Path) -> None:
    def body(world: Communicator) -> None:
        one, other = made(world, 1), made(world, 2)
        hpcsgd.save(tmp_path, one)
        with pytest.raises(
            JobError, match=r"neither saved nor loaded.*several optimizers are saved by one call"
        ):
            hpcsgd.save(tmp_path, other)
        for given in ((one, other), (other, one), (other,)):
            with pytest.raises(JobError):
                hpcsgd.save(tmp_path, *given)
        together = tmp_path / "together"
        hpcsgd.save(together, one, other)
        for given in ((other, one), (one,)):
            with pytest.raises(
                JobError, match="with others, or in another order: give the same ones in each"
            ):
                hpcsgd.save(together, *given)
        hpcsgd.save(together, one, other)
        with pytest.raises(UserError, match="an optimizer is given twice"):
            hpcsgd.save(together, one, one)
        before = [param.clone() for param in one.model.parameters()]
        steps(one, until=1)
        hpcsgd.load(tmp_path, one)
        assert all(map(torch.equal, one.model.parameters(), before))

    threads.run(2, body)


@pytest.mark.parametrize(("place", "message"), [
    ("step-00000002", "step-00000002 is a checkpoint, or has the name of one: give the folder that it is in"),
    ("step-00000077", "step-00000077 is a checkpoint, or has the name of one"),
    ("copied", "copied is a checkpoint"),
    ("file", "file is a file: give a folder for checkpoints"),
])  # fmt: skip
@pytest.mark.parametrize("call", [hpcsgd.load, hpcsgd.save])
def test_what_is_no_folder_of_checkpoints(
    tmp_path: Path, place: str, message: str, call: Callable[..., Any]
) -> None:
    threads.run(2, train, tmp_path, 1, 2)
    (tmp_path / "file").write_text("x")
    (tmp_path / "copied").mkdir()
    (tmp_path / "copied" / "manifest.json").write_text("{}")
    before = content(tmp_path)

    def body(world: Communicator) -> None:
        optimizer = made(world)
        with pytest.raises(JobError, match=message):
            call(tmp_path / place, optimizer)
        assert optimizer.t == 0

    threads.run(2, body)
    assert content(tmp_path) == before


@pytest.mark.parametrize("folder", [None, 3, b"checkpoints", "a\0b"])
def test_what_is_no_path(folder: Any) -> None:
    def body(world: Communicator) -> None:
        for call in (hpcsgd.save, hpcsgd.load):
            with pytest.raises((JobError, UserError), match=r"save|load"):
                call(folder, made(world))

    threads.run(2, body)


def test_who_begins_anew_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    threads.run(2, lambda world: hpcsgd.load(tmp_path / "nowhere", made(world)))
    (record,) = (each for each in caplog.records if each.levelno >= logging.WARNING)
    assert record.getMessage() == f"{tmp_path}/nowhere: no checkpoint is there: the training begins anew"
