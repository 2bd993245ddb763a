"""Prices of steps, compared with the papers' closed forms and with results by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from torch import nn

from hpcsgd.core.traffic import ModelLayout
from hpcsgd.cost.compute import Busy, Compute
from hpcsgd.cost.link_classes import link_classes
from hpcsgd.cost.links import Link
from hpcsgd.cost.machine import About, Machine
from hpcsgd.cost.papers import Setting, allreduce_epoch, hierarchical_epoch
from hpcsgd.cost.price import COMPUTE_ERROR, Computed, computed, over_run, price
from hpcsgd.engine.plan import StepPlan, Update
from hpcsgd.errors import UserError
from hpcsgd.methods import (
    Method,
    allreduce_local_sgd,
    bsp,
    delayed,
    hierarchical,
    osgp,
    selsync,
    sgp,
    streaming,
    switch,
)
from hpcsgd.parts.grad_reduces import Sparse
from hpcsgd.parts.sparsifiers import Deft

ALPHA, BETA = 3e-6, 1e-9
NOTHING = Computed(forward=0.0, backward=0.0)
LINEAR = nn.Linear(64, 32, bias=False)


def machine(K: int, error: float = 0.0) -> Machine:
    """Return a machine on which a group of K fills a host; its shared β give the paper's β per rank."""
    links = [
        Link(
            operation="any",
            kind=kind,
            alpha_seconds=(ALPHA,),
            beta_seconds_per_byte=(BETA / K,),
            relative_error=error,
        )
        for kind in ("inside", "across")
    ]
    return Machine(machine=About(hosts=64, ranks_per_host=K), link=tuple(links))


def sizes(P: int, K: int, bucket_bytes: float = 1e9, model: nn.Module = LINEAR) -> ModelLayout:
    return ModelLayout.of(model.named_parameters(), P, K, bucket_bytes)


def communication(method: Method, m: ModelLayout) -> float:
    """Return the seconds per step without those of the distance, which the paper does not count.

    The distance takes 8 bytes per synchronization.
    """
    phases = price(StepPlan.of(method), m, machine(m.K), NOTHING).phases
    return sum(phases.values()) - phases.get("distance", 0.0)


@pytest.mark.parametrize(("P", "K"), [(1, 4), (4, 1), (4, 2), (8, 4), (3, 2)])
def test_equals_the_closed_form_of_the_paper(P: int, K: int) -> None:
    """They equal eqs. 6 to 8, and eq. 5 if no other ranks share a link."""
    m = sizes(P, K)
    setting = Setting(samples=1000, B=10, I=5, nbytes=m.M * 4, alpha=ALPHA, beta=BETA)
    closed = float(hierarchical_epoch(setting, P, K)) / float(setting.steps(P))
    assert communication(hierarchical(5), m) == pytest.approx(closed, rel=1e-12)
    if 1 in (P, K):
        closed = float(allreduce_epoch(setting, P, K)) / float(setting.steps(P))
        assert communication(allreduce_local_sgd(5), m) == pytest.approx(closed, rel=1e-12)


def test_the_baseline_is_k_times_as_dear_at_a_synchronization() -> None:
    P, K = 8, 4
    m = sizes(P, K)
    ours, theirs = (
        price(StepPlan.of(method), m, machine(K), NOTHING).phases["model_average"]
        for method in (hierarchical(1), allreduce_local_sgd(1))
    )
    latency = 2 * np.log2(P) * ALPHA
    assert theirs - latency == pytest.approx(K * (ours - latency))


def test_gradients_hide_behind_the_backward_pass() -> None:
    m = sizes(1, 2, bucket_bytes=1.0, model=nn.Sequential(*(nn.Linear(30, 30, bias=False) for _ in range(4))))
    alone = price(StepPlan.of(bsp()), m, machine(2), NOTHING)
    assert len(m.buckets) == 4
    E = alone.phases["grad_reduce"]
    long = price(StepPlan.of(bsp()), m, machine(2), Computed(forward=1.0, backward=100 * E))
    assert long.phases["grad_reduce"] == pytest.approx(E / 4)  # the last bucket cannot be hidden
    assert long.hidden == pytest.approx(3 * E / 4)
    short = price(StepPlan.of(bsp()), m, machine(2), Computed(forward=1.0, backward=E / 10))
    assert short.phases["grad_reduce"] == pytest.approx(E - 3 / 4 * E / 10)
    slowed = price(StepPlan.of(bsp()), m, machine(2), Computed(forward=0.0, backward=100 * E, slowed=1.5))
    assert slowed.phases["compute"] == pytest.approx(100 * E + 0.5 * E)
    alone = Computed(forward=0.0, backward=100 * E, slowed=1.5)
    assert price(StepPlan.of(bsp()), m, machine(2), alone, overlap=False).phases["compute"] == pytest.approx(
        100 * E
    )


def test_overlapped_gossip_counts_where_it_is_longer_than_the_step() -> None:
    m = sizes(8, 2)
    messages = price(StepPlan.of(sgp()), m, machine(2), NOTHING).phases["model_average"]
    rest = price(StepPlan.of(sgp()), m, machine(2), NOTHING).seconds - messages
    inside = price(StepPlan.of(sgp()), m, machine(2), NOTHING).phases["param_gather"]
    hidden = price(StepPlan.of(osgp(1)), m, machine(2), Computed(forward=0.0, backward=10 * messages))
    assert "model_average" not in hidden.phases
    assert hidden.hidden == pytest.approx(messages, rel=1e-9)
    too_long = price(StepPlan.of(osgp(1)), m, machine(2), NOTHING)
    assert too_long.seconds == pytest.approx(rest + messages - inside)  # gathers leave the link free


def test_a_late_synchronization_counts_as_far_as_it_is_longer_than_its_delay() -> None:
    """Each counts max(0, synchronization − d steps); consecutive fragments use the time of all steps."""
    m, I = sizes(8, 1), 4  # noqa: E741 - the papers' letter
    at_once = price(StepPlan.of(hierarchical(I)), m, machine(1), NOTHING)
    sync_seconds = I * at_once.seconds
    for d, compute in (
        (1, sync_seconds / 4),
        (2, sync_seconds / 4),
        (3, sync_seconds / 2),
        (0, sync_seconds),
    ):
        cost = price(
            StepPlan.of(delayed(hierarchical(I), d)), m, machine(1), Computed(forward=compute, backward=0.0)
        )
        left = max(sync_seconds - d * compute, 0.0) / I
        assert cost.seconds == pytest.approx(compute + left, rel=1e-9)
        assert cost.hidden == pytest.approx(0.0 if d == 0 else sync_seconds / I - left, rel=1e-9, abs=1e-15)
        assert cost.nbytes == pytest.approx(at_once.nbytes, rel=1e-12)
    compute = sync_seconds / 10
    always = price(
        StepPlan.of(streaming(hierarchical(I), 4, 2)), m, machine(1), Computed(forward=compute, backward=0.0)
    )
    distance = 2 * np.log2(8) * ALPHA + 2 * 7 / 8 * 8 * BETA
    more = 3 * (2 * np.log2(8) * ALPHA + distance)  # three more messages with the same bytes in total
    assert always.seconds == pytest.approx((sync_seconds + more) / I, rel=1e-9)


def test_the_interval_is_that_of_the_errors() -> None:
    cost = price(StepPlan.of(bsp()), sizes(1, 2), machine(2, error=0.25), NOTHING)
    assert (cost.low, cost.high) == pytest.approx((0.8 * cost.seconds, 1.25 * cost.seconds))
    cost = price(StepPlan.of(bsp()), sizes(2, 1), machine(1), Computed(forward=1e6, backward=0.0))
    assert cost.high == pytest.approx((1 + COMPUTE_ERROR) * 1e6)


def test_a_stage_updates_all_at_once_as_the_engine_does() -> None:
    """Therefore nothing is gathered while the rest is updated."""
    m = sizes(2, 2, bucket_bytes=1.0, model=nn.Sequential(*(nn.Linear(30, 30, bias=False) for _ in range(4))))
    update = Computed(forward=0.0, backward=1.0, update=1.0)
    (_, first), _ = StepPlan.of(switch(bsp(), sgp(), at=5)).sequence
    alone, inside = (price(plan, m, machine(2), update) for plan in (StepPlan.of(bsp()), first))
    at_once = replace(StepPlan.of(bsp()), update_per_bucket=False, decided_before_update=False)
    assert inside == price(at_once, m, machine(2), update)
    assert inside.seconds > alone.seconds
    assert inside.nbytes == alone.nbytes


def test_a_stage_pays_for_its_search() -> None:
    m = sizes(2, 2)
    plan = StepPlan.of(switch(bsp(Sparse(Deft(0.1))), bsp(Sparse(Deft(0.2))), at=5))
    compute = Compute(
        batch_sizes=(8,), forward_seconds_by_batch=(1.0,), backward_seconds_by_batch=(2.0,),
        selection_seconds_per_element={"deft": 1e-2},
    )  # fmt: skip
    assert all(computed(stage, m, compute, 8).selection > 0 for _, stage in plan.sequence)


def test_the_mean_step_of_a_run() -> None:
    m, one = sizes(8, 2), Computed(forward=1.0, backward=1.0)
    few, many = (price(StepPlan.of(method), m, machine(2), one) for method in (osgp(1), hierarchical(4)))
    mean = over_run([(few, 30), (many, 10)])
    for name in ("seconds", "low", "high", "nbytes", "hidden", "behind"):
        told = (getattr(cost, name) for cost in (few, many, mean))
        first, second, both = told
        assert both == pytest.approx(0.75 * first + 0.25 * second, rel=1e-12)
    assert mean.phases.keys() == few.phases.keys() | many.phases.keys()
    assert mean.phases["model_average"] == pytest.approx(0.25 * many.phases["model_average"])
    assert over_run([(few, 30)]) is few


def test_what_a_rank_computes() -> None:
    compute = Compute(
        batch_sizes=(8, 16), forward_seconds_by_batch=(1.0, 2.0), backward_seconds_by_batch=(2.0, 4.0),
        update_seconds_per_element=1e-3, selection_seconds_per_element={"deft": 1e-2},
        busy=Busy(backward=1.2),
    )  # fmt: skip
    m = sizes(2, 2)
    own = computed(StepPlan.of(hierarchical(4)), m, compute, 12.0)
    assert (own.forward, own.backward, own.slowed) == pytest.approx((1.5, 3.0, 1.2))
    assert own.update == pytest.approx(m.M / 2 * 1e-3)
    assert computed(
        StepPlan.of(hierarchical(4), Update("model", by_itself=False)), m, compute, 12.0
    ).update == pytest.approx(m.M * 1e-3)
    sparse = computed(StepPlan.of(hierarchical(4, Sparse(Deft(0.1)))), m, compute, 12.0)
    assert sparse.selection == pytest.approx(m.M / 2 * 1e-2)  # with DEFT each rank searches its half
    assert sparse.update == pytest.approx(m.M * 1e-3)


def test_what_nobody_knows_is_said() -> None:
    with pytest.raises(UserError, match="how often the groups average"):
        price(StepPlan.of(selsync(0.3)), sizes(2, 2), machine(2), NOTHING)
    known = price(StepPlan.of(selsync(0.3)), sizes(2, 2), machine(2), NOTHING, sync_rate=0.5)
    assert known.phases["sync_decision"] > 0


@pytest.mark.parametrize(
    ("P", "K", "R", "expected"),
    [
        (4, 2, 2, {"intra_group": (2, 1, 1), "inter_group": (4, 4, 2), "world": (8, 4, 1)}),
        (8, 1, 2, {"intra_group": (1, 1, 2), "inter_group": (8, 4, 1), "world": (8, 4, 1)}),
        (2, 4, 2, {"intra_group": (4, 2, 1), "inter_group": (2, 2, 2), "world": (8, 4, 1)}),
        (1, 8, 2, {"intra_group": (8, 4, 1), "inter_group": (1, 1, 2), "world": (8, 4, 1)}),
        (2, 2, 8, {"intra_group": (2, 1, 2), "inter_group": (2, 1, 2), "world": (4, 1, 1)}),
    ],
)
def test_ways(P: int, K: int, R: int, expected: dict[str, tuple[int, int, int]]) -> None:
    found = link_classes(P, K, R)
    assert {name: (w.ranks, w.hosts, w.at_once) for name, w in found.items()} == expected
