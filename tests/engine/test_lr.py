from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler

from hpcsgd.engine.lr import WarmUp, first_factor, lr_scale
from hpcsgd.errors import UserError

MakeOptimizer = Callable[[list[nn.Parameter]], optim.Optimizer]


def parameters() -> list[nn.Parameter]:
    """Return parameters whose gradients are one, so that a step of SGD shows its learning rate."""
    params = [nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(2)]
    for p in params:
        p.grad = torch.ones_like(p)
    return params


def sgd() -> tuple[optim.SGD, list[nn.Parameter]]:
    """Return SGD with two parameter groups of rates 0.5 and 2, and the parameters."""
    params = parameters()
    return optim.SGD([{"params": params[:1], "lr": 0.5}, {"params": params[1:], "lr": 2.0}]), params


def rates_used(optimizer: optim.Optimizer, params: list[nn.Parameter], steps: int) -> list[list[float]]:
    used = []
    for _ in range(steps):
        before = [p.item() for p in params]
        optimizer.step()
        used.append([b - p.item() for b, p in zip(before, params, strict=True)])
    return used


@pytest.mark.parametrize(("rule", "factor"), [("none", 1.0), ("linear", 4.0), ("root", 2.0)])
def test_scale(rule: str, factor: float) -> None:
    assert lr_scale(rule, 4) == factor
    assert lr_scale(rule, 1) == 1.0


@pytest.mark.parametrize(
    ("rule", "P", "steps", "factor"),
    [
        ("linear", 4, 10, 0.25),
        ("root", 4, 10, 0.5),
        ("linear", 1, 10, 1.0),
        ("none", 4, 10, 0.1),
        ("none", 4, 0, 1.0),
    ],
)
def test_a_warm_up_begins_at_the_rate_of_one_group_or_unscaled_near_0(
    rule: str, P: int, steps: int, factor: float
) -> None:
    assert first_factor(rule, P, steps) == factor


def test_scale_by_the_root_of_an_odd_number() -> None:
    assert lr_scale("root", 3) == math.sqrt(3)


def test_unknown_rules_are_refused() -> None:
    with pytest.raises(UserError, match=r"'liner': did you mean 'linear'\? Allowed: linear, none, root"):
        lr_scale("liner", 2)


@pytest.mark.parametrize(("steps", "start"), [(4, 0.25), (1, 0.5), (10, 0.0), (5, 1.0), (0, 0.1)])
def test_the_rate_climbs(steps: int, start: float) -> None:
    optimizer, params = sgd()
    WarmUp(optimizer, steps, start)
    for t, (first, second) in enumerate(rates_used(optimizer, params, 12)):
        factor = start + (1 - start) * t / steps if t < steps else 1.0
        assert (first, second) == pytest.approx((0.5 * factor, 2.0 * factor), rel=1e-12)


def test_it_ends_at_the_very_rate() -> None:
    optimizer, params = sgd()
    warm_up = WarmUp(optimizer, 3, 0.1)
    rates_used(optimizer, params, 3)
    assert warm_up.factor() == 1.0


@pytest.mark.parametrize(("steps", "start"), [(-1, 0.5), (3, -0.1), (3, 1.1), (3, float("nan"))])
def test_impossible_warm_ups_are_refused(steps: int, start: float) -> None:
    with pytest.raises(UserError, match=r"warm-up of|start = nan"):
        WarmUp(sgd()[0], steps, start)


def test_nobody_sees_the_lowered_rate() -> None:
    optimizer, _ = sgd()
    WarmUp(optimizer, 10, 0.1)
    for _ in range(5):
        optimizer.step()
        assert [group["lr"] for group in optimizer.param_groups] == [0.5, 2.0]


SCHEDULERS: dict[str, Callable[[optim.Optimizer], lr_scheduler.LRScheduler]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 8),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 4], 0.1),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 3.0, total_steps=12, cycle_momentum=False),
}


@pytest.mark.parametrize("after", [False, True], ids=["scheduler made before", "scheduler made after"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_schedulers_go_on_as_without(scheduler: str, after: bool) -> None:
    plain, warmed = sgd(), sgd()
    without = SCHEDULERS[scheduler](plain[0])
    if after:
        warm_up = WarmUp(warmed[0], 6, 0.2)
        beside = SCHEDULERS[scheduler](warmed[0])
    else:
        beside = SCHEDULERS[scheduler](warmed[0])
        warm_up = WarmUp(warmed[0], 6, 0.2)
    for _ in range(10):
        factor = warm_up.factor()
        expected = [rate * factor for rate in rates_used(*plain, 1)[0]]
        assert rates_used(*warmed, 1)[0] == pytest.approx(expected, rel=1e-9)
        without.step()
        beside.step()
        assert beside.get_last_lr() == without.get_last_lr()


def test_the_state_goes_on() -> None:
    whole, first, second = sgd(), sgd(), sgd()
    WarmUp(whole[0], 6, 0.1)
    expected = rates_used(*whole, 8)
    before = WarmUp(first[0], 6, 0.1)
    used = rates_used(*first, 4)
    after = WarmUp(second[0], 6, 0.1)
    after.load_state_dict(before.state_dict())
    used += rates_used(*second, 4)
    assert [x for pair in used for x in pair] == pytest.approx([x for pair in expected for x in pair])


def fail_once(optimizer: optim.Optimizer) -> None:
    """Make a step that raises before it updates anything."""

    def fail(*_: object) -> None:
        handle.remove()
        raise RuntimeError("out of memory")

    handle = optimizer.register_step_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step()


def test_a_step_that_raises_does_not_count() -> None:
    optimizer, params = sgd()
    WarmUp(optimizer, 4, 0.0)
    rates_used(optimizer, params, 2)
    fail_once(optimizer)
    fail_once(optimizer)
    assert rates_used(optimizer, params, 3) == [[0.25, 1.0], [0.375, 1.5], [0.5, 2.0]]
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 2.0]


def test_a_rate_that_was_set_after_a_step_raised_stays() -> None:
    optimizer, params = sgd()
    WarmUp(optimizer, 4, 0.5)
    fail_once(optimizer)
    optimizer.param_groups[0]["lr"] = 0.125
    assert rates_used(optimizer, params, 1) == [[0.0625, 1.0]]
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_rates_that_are_tensors() -> None:
    params = parameters()
    rate = torch.tensor(0.5, dtype=torch.float64)
    optimizer = optim.SGD(params, lr=rate)
    WarmUp(optimizer, 2, 0.5)
    used: list[list[float]] = rates_used(optimizer, params, 3)
    assert used == [[0.25, 0.25], [0.375, 0.375], [0.5, 0.5]]
    left = optimizer.param_groups[0]["lr"]
    assert isinstance(left, Tensor)
    assert left is rate
    assert rate.item() == 0.5
