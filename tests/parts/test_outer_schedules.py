"""Outer schedules: their values, their stages, and what is refused."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import hpcsgd
from hpcsgd import UserError, outer_schedules
from hpcsgd.comm import Communicator
from hpcsgd.core.topology import form
from hpcsgd.core.traffic import ModelLayout
from hpcsgd.methods import diloco, ensemble_sync, sparseloco, streaming
from hpcsgd.methods.diloco import OuterOptimizer
from hpcsgd.parts.averagers import NESTEROV
from hpcsgd.parts.outer_schedules.base import OuterSchedule, OuterValues
from references import model, one_step

T = 1000


def values(schedule: OuterSchedule, *steps: int) -> list[tuple[float, float]]:
    found = [schedule.at(t, 4) for t in steps]
    return [
        (round(x.lr, 4), round(x.momentum, 4)) for x in found if x.lr is not None and x.momentum is not None
    ]


def test_the_stages_of_pier() -> None:
    """The values at the knots equal those of the code at the time of the paper, with its lazy start."""
    schedule = outer_schedules.pier(T, begin=0.1)
    assert values(schedule, 100, 149, 150, 199, 200, 500, 799, 800, 1000) == [
        (0.0, 0.99), (0.539, 0.99), (0.55, 0.95), (1.089, 0.95), (1.1, 0.9), (1.1, 0.9), (1.1, 0.9),
        (0.9, 0.9), (0.9, 0.9),
    ]  # fmt: skip
    assert schedule.knots == [0, 100, 150, 200, 800, 1000]


def test_without_a_lazy_start_the_stages_begin_at_once() -> None:
    schedule = outer_schedules.pier(T)
    assert values(schedule, 0, 50, 100, 799, 800) == [
        (0.0, 0.99), (0.55, 0.95), (1.1, 0.9), (1.1, 0.9), (0.9, 0.9)
    ]  # fmt: skip


def test_the_cosine_of_pier() -> None:
    """The values equal those of Pier's newer code, in iterations."""

    def miu(it: int) -> float:
        t = min(max(0, (it / T - 0.1) / 0.9), 1)
        return 0.9 + 0.5 * 0.09 * (1 + math.cos(math.pi * t))

    def outer_lr(it: int) -> float:
        if it < 200:
            return 1.1 * (it - 100) / 100
        return 0.9 + 0.5 * 0.2 * (1 + math.cos(math.pi * (it - 200) / 800))

    schedule = outer_schedules.pier_cosine(T, begin=0.1)
    for t in (100, 150, 199, 200, 600, 1000):
        assert schedule.at(t, 4) == pytest.approx((outer_lr(t), miu(t)))
    assert schedule.at(2 * T, 4) == pytest.approx((0.9, 0.9))
    assert schedule.knots == [0, 100, 200, 1000]


@pytest.mark.parametrize(
    ("P", "expected"), [(1, (0.9, 0.8)), (2, (0.9, 0.8)), (15, (0.9, 0.8)), (16, (1, 0.9)), (64, (1, 0.9))]
)
def test_the_values_of_muloco_go_by_the_groups(P: int, expected: tuple[float, float]) -> None:
    assert outer_schedules.muloco().at(1, P) == outer_schedules.muloco().at(10**6, P) == expected


def test_lines_and_jumps() -> None:
    schedule = outer_schedules.piecewise(10, lr=[[0.2, 1], [0.4, 2], [0.4, 5]])
    assert [schedule.at(t, 2).lr for t in (0, 2, 3, 4, 10, 11)] == pytest.approx([1, 1, 1.5, 5, 5, 5])
    assert schedule.at(3, 2).momentum is None


ADVICE = "expected a number ≥ 0"
NO_RUN = "expected the number of steps of the whole run, 1 to 10^12"
points = partial(outer_schedules.piecewise, 9)
REFUSED: dict[str, Callable[[], Any]] = {
    f"total_steps = 0: {NO_RUN}": lambda: outer_schedules.piecewise(0, lr=[[0, 1]]),
    f"total_steps = -1: {NO_RUN}": lambda: outer_schedules.pier(-1),
    f"total_steps = -5: {NO_RUN}": lambda: outer_schedules.pier_cosine(-5),
    "piecewise: total_steps alone: expected points of lr, of momentum or of both": points,
    "lr: the fraction 1.5 is outside the run: expected 0 to 1": lambda: points(lr=[[0, 1], [1.5, 2]]),
    "lr: the fraction -0.1 is outside the run: expected 0 to 1": lambda: points(lr=[[-0.1, 1]]),
    "lr: the fraction 0.2 comes after 0.5: expected stages in order": lambda: points(lr=[[0.5, 1], [0.2, 2]]),
    f"momentum: the value 1: {ADVICE} and < 1": lambda: points(momentum=[[0, 1.0]]),
    f"lr: the value -1: {ADVICE}": lambda: points(lr=[[0, -1.0]]),
    f"lr: the value inf: {ADVICE}": lambda: points(lr=[[0, math.inf]]),
    "lr: [0.5]: expected pairs of a fraction of the run and a value": lambda: points(lr=[[0.5]]),
    "begin = 0.8: expected a fraction of the run from 0 to 0.7, so that the rate has risen before its last "
    "stage": lambda: outer_schedules.pier(9, begin=0.8),
    "outer_schedule: its rate is 0 at step 2, where groups synchronize: they would lose what they have "
    "learned; let the schedule begin earlier": lambda: diloco(
        2, outer_schedule=outer_schedules.pier(100, begin=0.1)
    ),
    "outer_schedule: its rate is 0 at step 3, where groups synchronize: they would lose what they have "
    "learned; let the schedule begin earlier": lambda: streaming(
        diloco(9, outer_schedule=outer_schedules.piecewise(100, lr=[[0.04, 0], [0.05, 1]])), 3, 1
    ),
    "outer_schedule: sparseloco has no outer momentum: expected a schedule of lr alone": lambda: sparseloco(
        2, outer_schedule=outer_schedules.muloco()
    ),
    "lr = 0.5: outer_schedule sets the rate: give one of the two": lambda: sparseloco(
        2, lr=0.5, outer_schedule=points(lr=[[0, 1]])
    ),
    "outer_schedule: Adagrad has no momentum to set: leave momentum out of the schedule, or take an outer "
    "optimizer with momentum or betas": lambda: diloco(
        2, optim.Adagrad, outer_schedule=outer_schedules.muloco()
    ),
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_is_refused(line: str) -> None:
    with pytest.raises(UserError) as refused:
        REFUSED[line]()
    assert str(refused.value) == line


@pytest.mark.parametrize(
    ("every", "least"), [(1, None), (2, None), (3, "the stage from step 100 to 150: 17")]
)
def test_short_stages_are_reported(caplog: pytest.LogCaptureFixture, every: int, least: str | None) -> None:
    schedule = outer_schedules.piecewise(T, momentum=[[0.1, 0.5], [0.15, 0.9]])
    with caplog.at_level(logging.WARNING):
        diloco(every, outer_schedule=schedule)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (least is not None)
    assert (
        least is None or f"outer_schedule: too few synchronizations in {least}, advised are 20; " in told[0]
    )


@pytest.mark.parametrize(("every", "least"), [(2, None), (3, "from step 100 to 150: 17,")])
def test_short_stages_are_those_of_each_fragment(
    caplog: pytest.LogCaptureFixture, every: int, least: str | None
) -> None:
    schedule = outer_schedules.piecewise(T, momentum=[[0.1, 0.5], [0.15, 0.9]])
    with caplog.at_level(logging.WARNING):
        ensemble_sync(every, outer=NESTEROV, outer_schedule=schedule, num_fragments=every)
    assert [least is not None and least in line for line in caplog.messages] == [True] * (least is not None)


@pytest.mark.ranks(2)
def test_the_betas_of_adam_are_its_momentum(run) -> None:
    """The values in force are reported."""
    schedule = outer_schedules.piecewise(4, lr=[[0, 0.5]], momentum=[[0.5, 0.3], [1, 0.6]])

    def trained(world: Communicator) -> tuple[dict[str, float], list[tuple[float, float]]]:
        topology, net = form(world, 2), model()
        method = diloco(2, lambda ws: optim.Adam(ws, betas=(0.9, 0.95)), outer_schedule=schedule)
        optimizer = hpcsgd.DistributedOptimizer(optim.SGD(net.parameters(), lr=0.1), net, topology, method)
        for t in range(4):
            one_step(net, optimizer, topology, t)
        outer: Any = method.averager
        (group,) = outer.outer._optimizer.param_groups
        assert group["lr"] == 0.5
        return {name: x for name, x in optimizer.metrics.items() if "outer" in name}, group["betas"]

    for metrics, betas in run(2, trained):
        assert metrics == {"outer_lr": 0.5, "outer_momentum": 0.6}
        assert betas == (0.6, 0.95)


@pytest.mark.ranks(2)
def test_the_rate_of_sparseloco_is_reported(run) -> None:
    def reported(world: Communicator, given: dict[str, Any]) -> float | None:
        topology, net = form(world, 2), model()
        inner, method = optim.SGD(net.parameters(), lr=0.1), sparseloco(1, density=0.5, **given)
        optimizer = hpcsgd.DistributedOptimizer(inner, net, topology, method)
        one_step(net, optimizer, topology, 0)
        return optimizer.metrics.get("outer_lr")

    assert run(2, reported, {"outer_schedule": points(lr=[[0, 0.25]])}) == [0.25] * 2
    assert run(2, reported, {}) == [None] * 2


def test_a_momentum_that_begins_later_has_its_memory() -> None:
    """An SGD keeps no momentum while it is 0, but the memory that `plan` adds up includes it."""
    nets = [nn.Linear(4, 2)]
    named = [(name, p) for net in nets for name, p in net.named_parameters()]
    layout = ModelLayout.of(named, 2, 1, 1000.0)
    plain = diloco(2, lambda ws: optim.SGD(ws, lr=1.0)).averager
    later = diloco(
        2,
        lambda ws: optim.SGD(ws, lr=1.0),
        outer_schedule=outer_schedules.piecewise(9, momentum=[[0.5, 0], [0.5, 0.9]]),
    ).averager
    assert isinstance(plain, OuterOptimizer)
    assert isinstance(later, OuterOptimizer)
    assert later.memory_bytes(layout) == 2 * plain.memory_bytes(layout)


@pytest.mark.ranks(2)
def test_a_schedule_of_ones_own(run) -> None:
    """A schedule needs no base class."""

    class Halved:
        knots = ()

        def at(self, t: int, P: int) -> OuterValues:
            return OuterValues(lr=1 / P)

    def trained(world: Communicator, by: Any, lr: float) -> Tensor:
        topology, net = form(world, 2), model()
        method = diloco(2, lambda ws: optim.SGD(ws, lr=lr), outer_schedule=by)
        optimizer = hpcsgd.DistributedOptimizer(optim.SGD(net.parameters(), lr=0.1), net, topology, method)
        for t in range(4):
            one_step(net, optimizer, topology, t)
        return torch.cat([p.detach().flatten() for p in net.parameters()])

    for mine, other in zip(run(2, trained, Halved(), 7.0), run(2, trained, None, 0.5), strict=True):
        assert torch.equal(mine, other)
