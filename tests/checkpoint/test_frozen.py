"""Frozen parameters that a script changes itself come back as each rank had them, or as their mean."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import hpcsgd
from hpcsgd.checkpoint import Checkpoints, capture, restore_model
from hpcsgd.comm import Communicator, threads
from hpcsgd.core.topology import form
from references import batch, loss
from references import model as make_model


class MeanTeacher(nn.Module):
    """A student and its exponential moving average, beside frozen weights that never change."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.student = make_model(seed)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.same = nn.Linear(3, 3).double().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.same(self.student(x)) + self.teacher(x)

    def follow(self) -> None:
        for t, s in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            t.data.lerp_(s.data, 0.3)


class Run:
    def __init__(self, world: Communicator, P: int, seed: int = 0) -> None:
        self.rank, self.net = world.rank, MeanTeacher(seed)
        inner = optim.SGD(self.net.student.parameters(), lr=0.2, momentum=0.9)
        self.optimizer = hpcsgd.DistributedOptimizer(
            inner, self.net, form(world, P), hpcsgd.hierarchical(4), bucket_cap_mb=1e-4
        )

    def steps(self, first: int, last: int) -> None:
        for t in range(first, last):
            self.optimizer.zero_grad()
            loss(self.net, *batch(t, self.rank)).backward()
            self.optimizer.step()
            self.net.follow()

    def values(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.net.named_parameters()}


def saved_by(world: Communicator, P: int, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    run = Run(world, P)
    run.steps(0, 3)
    hpcsgd.save(folder, run.optimizer)
    saved = run.values()
    run.steps(3, 6)
    return saved, run.values()


@pytest.mark.parametrize(("P", "K"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_each_rank_continues_with_its_own(run, tmp_path: Path, P: int, K: int) -> None:
    def body(world: Communicator) -> Any:
        saved, last = saved_by(world, P, tmp_path)
        resumed = Run(world, P, seed=1)
        hpcsgd.load(tmp_path, resumed.optimizer)
        loaded = resumed.values()
        resumed.steps(3, 6)
        return saved, last, loaded, resumed.values()

    found = run(P * K, body)
    for saved, last, loaded, resumed in found:
        for name in saved:
            assert torch.equal(saved[name], loaded[name]), name
            assert torch.equal(last[name], resumed[name]), name
    differ = any(not torch.equal(found[0][0][n], found[-1][0][n]) for n in found[0][0] if "teacher" in n)
    assert differ == (P > 1)


@pytest.mark.parametrize(("P", "K"), [(1, 1), (1, 2), (4, 1)])
def test_on_another_shape_all_have_the_mean(tmp_path: Path, P: int, K: int) -> None:
    saved = [each for each, _ in threads.run(4, saved_by, 2, tmp_path)]

    def body(world: Communicator) -> dict[str, Tensor]:
        resumed = Run(world, P, seed=1)
        hpcsgd.load(tmp_path, resumed.optimizer)
        return resumed.values()

    def exported(world: Communicator) -> dict[str, Tensor]:
        last = Checkpoints(tmp_path, form(world, 1)).newest()
        assert last is not None
        model = MeanTeacher(seed=2)
        restore_model(last, model)
        return dict(model.named_parameters())

    for found in [*threads.run(P * K, body), *threads.run(1, exported)]:
        for name, value in found.items():
            mean = torch.stack([each[name] for each in saved]).mean(0)
            torch.testing.assert_close(value.detach(), mean, rtol=0, atol=1e-12)


@pytest.mark.ranks(2)
def test_those_that_are_the_same_are_saved_once(run) -> None:
    def body(world: Communicator) -> tuple[set[str], set[str]]:
        training = Run(world, 2)
        training.steps(0, 1)
        tree = capture(training.optimizer, shared={}, own={})
        return set(tree["frozen"]), {name.partition(".")[0] for name in tree["frozen_of_ranks"]}

    assert run(2, body) == [({"same.weight", "same.bias"}, {"teacher"}), (set(), {"teacher"})]
