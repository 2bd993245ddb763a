"""The state of all groups inside a checkpoint of the Hugging Face libraries, here on threads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from hpcsgd.comm import Communicator, threads
from hpcsgd.core.topology import form
from hpcsgd.engine.optimizer import DistributedOptimizer
from hpcsgd.errors import JobError
from hpcsgd.hugging_face import group_state
from hpcsgd.methods import hierarchical


def wrapped(world: Communicator, value: float) -> DistributedOptimizer:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(value)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return DistributedOptimizer(inner, model, form(world, world.size), hierarchical(sync_every=4))


def step(optimizer: DistributedOptimizer) -> None:
    x = torch.full((1, 3), 1.0 + optimizer.topology.world.rank)
    optimizer.model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def weights(optimizer: DistributedOptimizer) -> list[list[float]]:
    return [p.flatten().tolist() for p in optimizer.model.parameters()]


@pytest.mark.parametrize("count", [1, 2])
def test_every_optimizer_goes_on_with_its_groups_weights(count: int, tmp_path: Path) -> None:
    def body(world: Communicator) -> None:
        saved = [wrapped(world, number) for number in range(count)]
        for _ in range(2):
            for optimizer in saved:
                step(optimizer)
        group_state.write(tmp_path, saved, "save")
        restored = [wrapped(world, -1) for _ in range(count)]
        group_state.restore_all(tmp_path, restored, "load")
        assert [each.t for each in restored] == [2] * count
        for mine, theirs in zip(restored, saved, strict=True):
            step(mine)  # with the momentum that was saved
            step(theirs)
            assert weights(mine) == weights(theirs)
        of_groups = world.gather_objects(weights(restored[0]))
        assert of_groups[0] != of_groups[1]

    threads.run(2, body)


def test_a_folder_without_the_state(tmp_path: Path) -> None:
    def body(world: Communicator) -> None:
        with pytest.raises(JobError, match=r"has no folder 'hpcsgd' with a checkpoint: it was not saved by"):
            group_state.restore_all(tmp_path, [wrapped(world, 0)], "load")

    threads.run(2, body)
