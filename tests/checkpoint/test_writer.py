"""Checkpoints written during training are of one step and come in order; failures are reported."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch

from hpcsgd.checkpoint import Checkpoints, Writer, tree
from hpcsgd.comm import Communicator, PeerLost, threads
from hpcsgd.core.topology import form
from hpcsgd.errors import JobError

PATIENCE = 60.0  # seconds; the machine may be busy


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A disk that writes nothing until the returned event is set."""
    ready, write = threading.Event(), tree.write

    def waiting(*given: Any) -> None:
        assert ready.wait(PATIENCE)
        write(*given)

    monkeypatch.setattr(tree, "write", waiting)
    return ready


def found(world: Communicator, path: Path) -> tuple[int, float] | None:
    saved = Checkpoints(path, form(world)).newest()
    if saved is None:
        return None
    with h5py.File(saved.rank_file(0, world.rank)) as file:
        return saved.step, tree.read(file)["x"][0].item()


@pytest.mark.parametrize("n", [1, 2])
def test_what_is_written_is_of_its_step(n: int, tmp_path: Path, slow: threading.Event) -> None:
    def train(world: Communicator) -> None:
        writer, x = Writer(tmp_path, form(world)), torch.zeros(50)
        writer.begin(3, {"x": x, "inside": [x]})
        x += 1  # the next step, before anything is on the disk
        world.allreduce(x).wait()
        assert found(world, tmp_path) is None
        world.barrier()
        slow.set()
        writer.finish()
        assert found(world, tmp_path) == (3, 0.0)

    threads.run(n, train)


def test_one_after_the_other(tmp_path: Path, slow: threading.Event) -> None:
    def train(world: Communicator) -> None:
        writer, x = Writer(tmp_path, form(world)), torch.zeros(50)
        for step in (1, 2, 3):
            writer.begin(step, {"x": x})
            x += 1
            world.barrier()
            slow.set()
            assert found(world, tmp_path) in {None, (1, 0.0), (2, 1.0), (3, 2.0)}
        writer.finish()
        assert found(world, tmp_path) == (3, 2.0)

    threads.run(2, train)


def test_a_failure_is_reported_on_all_ranks_when_the_next_begins(tmp_path: Path) -> None:
    def train(world: Communicator) -> tuple[str, Any]:
        writer = Writer(tmp_path, form(world))
        writer.begin(1, {"x": torch.ones(2)})
        writer.begin(2, {"x": range(3) if world.rank == 1 else 1})
        with pytest.raises(JobError) as told:
            writer.begin(3, {"x": torch.zeros(2)})
        writer.finish()  # there is nothing to wait for
        return str(told.value), found(world, tmp_path)

    message = "rank 1 of 2, writing a checkpoint: x: a range cannot be saved in a checkpoint"
    assert threads.run(2, train) == [(message, (1, 1.0))] * 2


class Late:
    """A stand-in for a `Work` whose `wait` times out once per item of `writing`, and then succeeds."""

    def __init__(self, checkpoints: Checkpoints, *writing: bool) -> None:
        self._checkpoints, self.writing = checkpoints, list(writing)

    def wait(self) -> None:
        if self.writing:
            self._checkpoints.writing = self.writing.pop(0)
            raise PeerLost("no answer")


def test_its_own_file_may_take_longer_than_others_are_waited_for(tmp_path: Path) -> None:
    def finish(world: Communicator) -> None:
        writer: Any = Writer(tmp_path, form(world))
        writer._under_way = late = Late(writer._checkpoints, True, True)
        writer.finish()
        assert late.writing == []
        writer._under_way = Late(writer._checkpoints, True, False, True)
        with pytest.raises(PeerLost):
            writer.finish()
        writer.finish()  # the failed write is no longer waited for

    threads.run(1, finish)
