"""The plan of a step describes methods, and it is the same for the engine and the cost model."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import nn, optim

import hpcsgd
from hpcsgd.comm import threads
from hpcsgd.core.graphs import Exponential, Ring
from hpcsgd.core.topology import form
from hpcsgd.core.waits import (
    All,
    InNeighbors,
    Living,
    Pairs,
    RandomPartner,
    Slowest,
    Then,
    Unknown,
    Waits,
    in_turns,
)
from hpcsgd.engine.dividing import update_of
from hpcsgd.engine.plan import StepPlan, Update
from hpcsgd.errors import UserError
from hpcsgd.methods import (
    Method,
    ad_psgd,
    adacomm,
    allreduce_local_sgd,
    async_sgd,
    bsp,
    d_psgd,
    delayed,
    des_loc,
    diloco,
    ensemble_sync,
    fedavg,
    hierarchical,
    noloco,
    osgp,
    post_local,
    sasgd,
    selsync,
    sgp,
    sparseloco,
    ssp,
    streaming,
    switch,
)
from hpcsgd.parts.averagers import Mean
from hpcsgd.parts.grad_reduces import AllToAll, Quantized, Sparse, WithAllgather
from hpcsgd.parts.quantizers import int8
from hpcsgd.parts.schedules import never
from hpcsgd.parts.sparsifiers import TopK
from hpcsgd.performance.simulation.rules import rule_of
from methods.table import EXCEPTIONS, REFERENCES, Case, Exempt

WHOLE = Update("model", by_itself=False)
TENSORS = Update("tensors")


@pytest.mark.parametrize(
    ("method", "update", "sharding", "gathered", "per_bucket", "decided"),
    [
        (lambda: hierarchical(2), Update(), "elements", False, True, True),
        (lambda: hierarchical(2), TENSORS, "tensors", False, True, True),
        (lambda: hierarchical(2), WHOLE, "model", True, False, True),
        (lambda: hierarchical(2), Update("model"), "model", True, True, True),  # declared only by the user
        (lambda: ensemble_sync(2), TENSORS, "model", True, False, True),
        (lambda: hierarchical(2, Sparse(TopK(0.1))), WHOLE, "model", False, False, True),
        (lambda: selsync(0.3), Update(), "elements", False, False, False),
        (lambda: adacomm(2, adapt_every=4), Update(), "elements", False, True, False),
        (sgp, Update(), "elements", False, False, True),
        (lambda: delayed(hierarchical(4), 2), Update(), "elements", False, True, True),
    ],
)
def test_what_a_plan_says(
    method: Callable[[], Method],
    update: Update,
    sharding: str,
    gathered: bool,
    per_bucket: bool,
    decided: bool,
) -> None:
    plan = StepPlan.of(method(), update)
    assert plan.sharding == sharding
    assert isinstance(plan.grad_reduce, WithAllgather) == gathered
    assert plan.update_per_bucket == per_bucket
    assert plan.decided_before_update == decided
    assert plan.gather_per_bucket == (per_bucket and decided)


def test_quantized_parameters_are_gathered_at_the_end() -> None:
    plan = StepPlan.of(bsp(Quantized(parameters=int8())))
    assert plan.update_per_bucket
    assert not plan.gather_per_bucket


def test_how_often_groups_average() -> None:
    rates = {
        0.0: bsp(),
        0.25: hierarchical(4),
        0.5: streaming(hierarchical(4), 2, 1),
        0.4: fedavg(1.0, 2, steps_per_epoch=5),
    }
    for rate, method in rates.items():
        assert StepPlan.of(method).sync_rate() == rate
        assert StepPlan.of(method).sync_rate(0.9) == rate
    assert StepPlan.of(selsync(0.3)).sync_rate(0.9) == 0.9
    with pytest.raises(UserError, match="how often the groups average depends on the gradients"):
        StepPlan.of(selsync(0.3)).sync_rate()


GOSSIP = InNeighbors(Exponential(1), period=1)
WAITS: dict[str, tuple[Callable[[], Method], Waits]] = {
    "ad_psgd": (lambda: ad_psgd(seed=3), RandomPartner(3, period=1)),
    "adacomm": (lambda: adacomm(2, adapt_every=4), All()),
    "allreduce_local_sgd": (lambda: allreduce_local_sgd(4), All(period=4)),
    "async_sgd": (async_sgd, Slowest(None, period=1)),
    "bsp": (bsp, All(period=1)),
    "d_psgd": (d_psgd, InNeighbors(Ring(), period=1)),
    "delayed": (lambda: delayed(noloco(4), 2), Pairs(0, every=4, late=2, period=4)),
    "des_loc": (lambda: des_loc(4, optimizer_state={"sums": 8}), All(period=4)),
    "diloco": (lambda: diloco(4, optimizer_state=hpcsgd.AverageState), All(period=4)),
    "ensemble_sync": (lambda: ensemble_sync(4), Living(period=4)),
    "fedavg": (lambda: fedavg(0.5, 3, steps_per_epoch=8), All(period=Fraction(8, 3))),
    "hierarchical": (lambda: hierarchical(4, quantize=int8()), All(period=4)),
    "noloco": (lambda: noloco(4, seed=7), Pairs(7, every=4, period=4)),
    "osgp": (lambda: osgp(2), InNeighbors(Exponential(1), 2, period=1)),
    "post_local": (lambda: post_local(4), Then(All(period=1), All(period=4), None)),
    "sasgd": (lambda: sasgd(4), All(period=4)),
    "selsync": (lambda: selsync(0.3), All()),
    "sgp": (sgp, GOSSIP),
    "sparseloco": (lambda: sparseloco(4), All(period=4)),
    "ssp": (lambda: ssp(2), Slowest(2, period=1)),
    "streaming": (lambda: streaming(diloco(4), 3, 2), All(2, period=Fraction(4, 3))),
    "switch": (lambda: switch(sgp(), delayed(diloco(4), 1), 9), Then(GOSSIP, All(1, period=4), 9)),
}


@pytest.mark.parametrize("case", [*REFERENCES.values(), *EXCEPTIONS.values()], ids=lambda case: case.method)
def test_every_method_says_who_waits_for_whom(case: Case | Exempt) -> None:
    """The plan says which ranks wait for which.

    For each method there is a rule, or a reason why there is none.
    """
    waits = StepPlan.of(case.new()).waits
    assert isinstance(waits, Waits)
    if depends_on_the_training(waits):
        with pytest.raises(UserError, match="this method cannot be simulated: "):
            rule_of(waits)
    else:
        rule_of(waits)


def depends_on_the_training(waits: Waits) -> bool:
    match waits:
        case Unknown():
            return True
        case Then(first, then, at):
            return at is None or depends_on_the_training(first) or depends_on_the_training(then)
        case _:
            return waits.period is None


@pytest.mark.parametrize("method", WAITS)
@pytest.mark.parametrize("update", [Update(), WHOLE])
def test_who_waits_for_whom(method: str, update: Update) -> None:
    new, waits = WAITS[method]
    assert StepPlan.of(new(), update).waits == waits


def test_optimizer_state_of_other_intervals_and_groups_that_never_average_are_not_known() -> None:
    assert isinstance(StepPlan.of(des_loc(4, first_every=6)).waits, Unknown)
    assert StepPlan.of(Method(AllToAll(), never, Mean())).waits == Unknown("its groups never average")


def stages_of(method: Method, steps: int) -> list[tuple[type, int]]:
    return [(type(plan.averager), count) for plan, count in StepPlan.of(method).of_run(steps)]


def test_a_run_goes_by_the_stages_of_its_method() -> None:
    first, then, last = sgp, bsp, d_psgd
    A, B, C = (type(new().averager) for new in (first, then, last))
    assert stages_of(first(), 10) == [(A, 10)]
    assert stages_of(switch(first(), then(), 4), 10) == [(A, 4), (B, 6)]
    assert stages_of(switch(first(), then(), 0), 10) == [(B, 10)]
    for late in (10, 11):
        assert stages_of(switch(first(), then(), late), 10) == [(A, 10)]
    inside = [switch(switch(first(), then(), 3), last(), 7), switch(first(), switch(then(), last(), 7), 3)]
    for method in inside:
        assert stages_of(method, 10) == [(A, 3), (B, 4), (C, 3)]
    assert stages_of(switch(switch(first(), then(), 7), last(), 3), 10) == [(A, 3), (C, 7)]
    assert stages_of(switch(first(), switch(then(), last(), 3), 3), 10) == [(A, 3), (B, 7)]  # step 3 is past
    for method in (post_local(4), switch(sgp(), post_local(4), 3)):
        with pytest.raises(UserError, match="it is not known when this method switches") as told:
            StepPlan.of(method).of_run(10)
        assert "\n" not in str(told.value)


@pytest.mark.parametrize("at", [0, 3])
def test_who_waits_follows_from_the_stages(at: int) -> None:
    plan = StepPlan.of(switch(sgp(), hierarchical(4), at))
    waits = [(until, stage.waits) for until, stage in plan.sequence]
    assert waits == [(3, GOSSIP), (None, All(period=4))][at == 0 :]
    assert plan.waits == in_turns(waits)


@pytest.mark.parametrize("update", [Update(), WHOLE, TENSORS])
def test_a_stage_is_carried_out_as_the_whole_is(update: Update) -> None:
    plan = StepPlan.of(switch(hierarchical(2), bsp(), 3), update)
    for _, stage in plan.sequence:
        for name in ("sharding", "update_per_bucket", "decided_before_update", "divides_tensors"):
            assert getattr(stage, name) == getattr(plan, name)
        assert isinstance(stage.grad_reduce, WithAllgather) == isinstance(plan.grad_reduce, WithAllgather)


def test_rows_need_an_optimizer_that_updates_each_element_by_itself() -> None:
    assert StepPlan.of(bsp(), by_torch=True).sharding == "rows"
    line = r"sharded by torch, and Adafactor is not known .* \(DistributedOptimizer\(elementwise=True\)"
    with pytest.raises(UserError, match=line):
        StepPlan.of(bsp(), update_of(optim.Adafactor([nn.Parameter(torch.zeros(2))])), by_torch=True)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, Update("elements", True, "SGD")),
        ({"elementwise": False}, Update("model", True, "SGD")),
        ({"elementwise": False, "tensorwise": True}, Update("tensors", True, "SGD")),
    ],
)
def test_what_the_user_says_of_the_optimizer_counts(given: dict[str, Any], expected: Update) -> None:
    inner = optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    assert update_of(inner, **given) == expected


def test_the_engine_has_the_plan_that_the_cost_model_prices() -> None:
    net = nn.Linear(2, 2)
    for method in (hierarchical(2), bsp(), selsync(0.3), sgp(), switch(bsp(), sgp(), 3)):
        inner = optim.SGD(net.parameters(), lr=0.1)
        (made,) = threads.run(
            1, lambda world, m=method, o=inner: hpcsgd.DistributedOptimizer(o, net, form(world), m)
        )
        assert made._plan == StepPlan.of(method, update_of(inner))
