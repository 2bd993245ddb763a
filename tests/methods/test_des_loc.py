"""Tests of DES-LOC: optimizer state that is averaged at intervals of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, optim

import hpcsgd
from hpcsgd.comm import Communicator, threads
from hpcsgd.core.topology import form
from hpcsgd.core.traffic import ModelLayout
from hpcsgd.cost.collectives import sent
from hpcsgd.cost.traffic import of_step
from hpcsgd.engine.plan import StepPlan
from hpcsgd.errors import UserError
from hpcsgd.methods import Method, des_loc, hierarchical
from hpcsgd.methods.des_loc import share_of_steps
from hpcsgd.parts.averagers import AverageState
from hpcsgd.train.training_profile import state_of
from local_methods import desynced
from methods.test_battery import OPTIMIZERS
from methods.test_unused_parts import Branches
from parts.averagers.test_optimizer_state import ADAPTIVE, Two
from references import MakeOptimizer, distributed, model, one_step, same
from trainings import Rows

STEPS = 12
MADE: dict[str, tuple[Callable[[], Method], tuple[int, int, int]]] = {
    "no multiple of each other": (lambda: des_loc(3, 2, 5), (3, 2, 5)),
    "as advised": (lambda: des_loc(2), (2, 6, 12)),
    "parameters least of all": (lambda: des_loc(6, 1, 2), (6, 1, 2)),
}


@pytest.mark.threads(unless={"P": 3, "K": 2, "optimizer": "AdamW"})
@pytest.mark.parametrize("optimizer", ["momentum", "AdamW"])
@pytest.mark.parametrize(("P", "K"), [(3, 1), (2, 2), (3, 2)])
@pytest.mark.parametrize("label", MADE)
def test_equals_plain_torch(run, label: str, P: int, K: int, optimizer: str) -> None:
    new, (every, first, second) = MADE[label]
    periods = {"exp_avg": first, "momentum_buffer": first, "exp_avg_sq": second}
    make = OPTIMIZERS[optimizer]
    ranks = run(P * K, lambda world: distributed(world, P, new(), make, STEPS, bucket_cap_mb=3e-4))
    same(ranks, desynced(P, K, every, periods, make, STEPS), K)


def amsgrad(params: Any) -> optim.Optimizer:
    return optim.Adam(params, lr=0.05, amsgrad=True)


@pytest.mark.parametrize(("P", "K"), [(3, 1), (2, 2)])
def test_optimizer_state_by_name(run, P: int, K: int) -> None:
    """One entry has another interval than its kind; max_exp_avg_sq is a second moment, too."""
    new = lambda: des_loc(4, 3, 2, optimizer_state={"exp_avg_sq": 5})  # noqa: E731
    ranks = run(P * K, lambda world: distributed(world, P, new(), amsgrad, STEPS))
    periods = {"exp_avg": 3, "exp_avg_sq": 5, "max_exp_avg_sq": 2}
    same(ranks, desynced(P, K, 4, periods, amsgrad, STEPS), K)


@pytest.mark.parametrize(("P", "K"), [(3, 1), (2, 2)])
@pytest.mark.parametrize("name", ["momentum", "Adam", "NAdam"])
def test_with_one_interval_it_is_local_sgd_with_averaged_optimizer_state(
    run, name: str, P: int, K: int
) -> None:
    """The bits are equal, including the step counts, which groups that use different parts do not share."""

    def ends(world: Communicator, method: Method) -> list[Tensor]:
        net, topology = Two(), form(world, groups=P)
        inner = ADAPTIVE[name](list(net.parameters()))
        optimizer = hpcsgd.DistributedOptimizer(inner, net, topology, method)
        for t in range(6):
            optimizer.zero_grad()
            net(t, topology.group_index).backward()
            optimizer.step()
        return [p.detach().clone() for p in net.parameters()]

    ours = run(P * K, lambda world: ends(world, des_loc(2, 2, 2)))
    theirs = run(P * K, lambda world: ends(world, hierarchical(2, optimizer_state=AverageState)))
    for mine, other in zip(ours, theirs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))


def counted(
    world: Communicator, P: int, method: Method, make: MakeOptimizer, net: torch.nn.Module
) -> list[Any]:
    """Return the bytes of each step by phase."""
    topology, found = form(world, P), []
    optimizer = hpcsgd.DistributedOptimizer(
        make(list(net.parameters())), net, topology, method, bucket_cap_mb=2e-4
    )
    for t in range(STEPS):
        before = world.stats.totals()
        one_step(net, optimizer, topology, t)
        found.append({name: total.bytes for name, total in world.stats.since(before).items()})
    return found


@pytest.mark.parametrize(("P", "K"), [(3, 1), (2, 2)])
def test_where_optimizer_state_is_averaged_alone_no_parameter_goes_across_groups(run, P: int, K: int) -> None:
    """K_x = 4, K_u = 3, K_v = 6. Parameters are gathered inside the group as after any other step."""
    for steps in run(P * K, lambda world: counted(world, P, des_loc(4, 3, 6), OPTIMIZERS["AdamW"], model())):
        plain = steps[0].get("param_gather", 0.0)
        for t, sent_then in enumerate(steps, 1):
            assert (sent_then.get("model_average", 0.0) > 0) == (t % 4 == 0)
            assert (sent_then.get("state_average", 0.0) > 0) == (t % 3 == 0)
            assert sent_then.get("param_gather", 0.0) == plain
        u, both = steps[2]["state_average"], steps[5]["state_average"]
        assert u < 0.7 * both
        assert steps[8]["state_average"] == pytest.approx(u)
        assert steps[11]["state_average"] == pytest.approx(both)


@pytest.mark.ranks(2)
def test_counts_come_along_with_optimizer_state_alone(run) -> None:
    """RMSprop has no first moment: in a step where only that would be due, step counts are not sent."""
    make: MakeOptimizer = lambda params: optim.RMSprop(params, lr=0.01)  # noqa: E731
    for steps in run(
        2, lambda world: counted(world, 2, des_loc(4, first_every=2, second_every=3), make, model())
    ):
        assert [t for t, step in enumerate(steps, 1) if step.get("state_average", 0.0)] == [3, 6, 9, 12]


@pytest.mark.ranks(4)
def test_an_optimizer_of_whole_tensors(run) -> None:
    """Each rank has whole state tensors: if they are averaged alone, nothing has to be gathered."""
    make: MakeOptimizer = lambda params: Rows(params, lr=0.1)  # noqa: E731
    new = lambda: des_loc(4, optimizer_state={"sums": 3})  # noqa: E731
    ranks = run(4, lambda world: distributed(world, 2, new(), make, STEPS))
    same(ranks, desynced(2, 2, 4, {"sums": 3}, make, STEPS), 2)
    for steps in run(4, lambda world: counted(world, 2, new(), make, model())):
        plain = {t: step for t, step in enumerate(steps, 1) if t % 4}
        assert len({step.get("param_gather", 0.0) for step in plain.values()}) == 1
        assert all((step.get("state_average", 0.0) > 0) == (t % 3 == 0) for t, step in enumerate(steps, 1))


@pytest.mark.parametrize(("P", "K"), [(3, 2), (2, 2)])
@pytest.mark.parametrize("make_model", [model, Branches])
@pytest.mark.parametrize("periods", [(3, 2, 4), (2, 3, 6), (1, 12, 12)])
def test_bytes_are_as_predicted(
    run, periods: tuple[int, int, int], make_model: Callable[[], torch.nn.Module], P: int, K: int
) -> None:
    """The predicted bytes hold for different intervals, over a whole number of each.

    Step counts are sent with either moment.
    """
    ranks = run(P * K, lambda world: counted(world, P, des_loc(*periods), OPTIMIZERS["AdamW"], make_model()))
    net = make_model()
    m = ModelLayout.of(
        net.named_parameters(), P, K, 200.0, *state_of(OPTIMIZERS["AdamW"](list(net.parameters())))
    )
    for phase in ("model_average", "state_average"):
        messages = [x for x in of_step(StepPlan.of(des_loc(*periods)), m) if x.phase == phase]
        expected = sum(x.times * float(sent(x.operation, x.nbytes, m.ranks(x.over))) for x in messages)
        found = sum(step.get(phase, 0.0) for steps in ranks for step in steps) / len(ranks) / STEPS
        assert found == pytest.approx(expected, rel=1e-12)
        assert found > 0


def test_the_share_of_steps_in_which_any_is_due() -> None:
    for periods in ([4], [2, 3], [4, 6], [3, 9], [2, 3, 5], [4, 4]):
        whole = range(180)
        assert share_of_steps(periods) == pytest.approx(
            sum(any(t % p == 0 for p in periods) for t in whole) / 180
        )
    assert share_of_steps([]) == 0


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("make", "moments", "message"),
    [
        ("momentum", {"exp_avg": 4}, "SGD has no exp_avg; it has momentum_buffer"),
        ("SGD", {"momentum_buffer": 4}, "SGD has no momentum_buffer; it has none"),
        (
            "AdamW",
            {"exp_avg_sq": 2, "sums": 4},
            "AdamW has no sums; it has exp_avg, exp_avg_sq, step",
        ),
    ],
)
def test_optimizer_state_that_there_is_not(run, make: str, moments: dict[str, int], message: str) -> None:
    """All ranks raise the error in the first step, not only when the state would be averaged."""

    def told(world: Communicator) -> str:
        with pytest.raises(UserError) as caught:
            distributed(world, 2, des_loc(50, optimizer_state=moments), OPTIMIZERS[make], 1)
        return str(caught.value)

    assert run(2, told) == [f"optimizer_state: {message}"] * 2


@pytest.mark.skipif(not hasattr(optim, "Muon"), reason="torch has no Muon yet")
def test_a_position_may_own_nothing_of_a_kind(caplog: pytest.LogCaptureFixture) -> None:
    """With one hidden matrix for two ranks, one rank has no momentum, although the optimizer keeps it."""
    caplog.set_level(logging.WARNING)

    def train(world: Communicator) -> None:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(6, 4, bias=False), torch.nn.Linear(4, 3, bias=False))
        method = des_loc(4, first_every=2, second_every=3, optimizer_state={"momentum_buffer": 2})
        optimizer = hpcsgd.DistributedOptimizer(hpcsgd.muon(net, lr=0.01), net, form(world, 2), method)
        for _ in range(4):
            optimizer.zero_grad()
            net(torch.randn(5, 6)).square().mean().backward()
            optimizer.step()

    threads.run(4, train)
    assert not [r for r in caplog.records if "is ignored" in r.getMessage()]


def test_an_interval_that_is_of_no_use_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    train = lambda world, method: distributed(world, 2, method, OPTIMIZERS["momentum"], 1)  # noqa: E731
    threads.run(2, lambda world: train(world, des_loc(5, first_every=4)))
    assert not caplog.records
    threads.run(2, lambda world: train(world, des_loc(5, second_every=4)))
    assert [r.getMessage() for r in caplog.records] == [
        "des_loc: second_every is ignored: SGD keeps no second moment"
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sync_every": 0}, "sync_every = 0: groups average after at least 1 step"),
        ({"first_every": 0}, "first_every = 0: expected a number of steps ≥ 1"),
        ({"second_every": 2.5}, "second_every = 2.5: expected a whole number or None"),
        ({"optimizer_state": {"exp_avg": -1}}, "exp_avg = -1: expected a number of steps"),
        (
            {"optimizer_state": {"exp_avg": "4"}},
            "optimizer_state = {'exp_avg': '4'}: expected a dict of whole numbers",
        ),
    ],
)
def test_refusals(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        des_loc(**{"sync_every": 2, **arguments})
    assert "\n" not in str(caught.value)
