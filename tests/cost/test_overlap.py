"""Overlapping computation and communication, computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from hpcsgd.core.traffic import ModelLayout
from hpcsgd.cost.link_classes import Kind
from hpcsgd.cost.links import Link
from hpcsgd.cost.machine import About, Machine
from hpcsgd.cost.overlap import Buckets, Update, awaited, exposed, pipelined
from hpcsgd.cost.price import Computed, StepCost, price
from hpcsgd.engine.plan import StepPlan
from hpcsgd.methods import Method, bsp, diloco, hierarchical

BUCKETS = Buckets(
    inside=(1.0,) * 3, across=(4.0,) * 3, model_average=(5.0,) * 3, gather=(2.0,) * 3, own_links=True
)
UPDATE = Update(seconds=3.0, in_parts=True, gathered=True)
READY, BACKWARD = (0.0, 0.0, 0.0), 0.0


def test_pipelined() -> None:
    assert pipelined([1.0, 2.0, 3.0], [0.5, 0.5, 0.5]) == 3.5
    assert pipelined([1.0, 2.0, 3.0], [2.0, 2.0, 2.0]) == 7.0
    assert pipelined([], []) == 0.0


def test_only_what_the_last_bucket_waits_for_is_left() -> None:
    """Buckets are reduced after 5, 9, 13, updated after 6, 10, 14 and gathered after 8, 12, 16 s.

    After a synchronization, one gather is not hidden.
    """
    rest = exposed(READY, BACKWARD, BUCKETS, UPDATE)
    assert (rest.grad_reduce, rest.gather, rest.gather_after_sync) == (14 - 3, 2, 2)


def test_on_shared_links_all_is_one_after_the_other() -> None:
    rest = exposed(READY, BACKWARD, replace(BUCKETS, own_links=False), UPDATE)
    assert (rest.grad_reduce, rest.gather, rest.gather_after_sync) == (15 + 1 - 3, 6, 6)


def test_an_update_of_all_comes_after_the_last_bucket() -> None:
    rest = exposed(READY, BACKWARD, BUCKETS, replace(UPDATE, in_parts=False))
    assert (rest.grad_reduce, rest.gather) == (13, 6)
    rest = exposed(READY, BACKWARD, BUCKETS, replace(UPDATE, gathered=False))
    assert (rest.grad_reduce, rest.gather) == (11, 6)


def test_a_forward_pass_waits_for_what_it_uses_first() -> None:
    """The last bucket's weights arrive after 2 s, the others during the 4 s of computing that follow."""
    assert awaited([100, 200, 400], [2.0, 2.0, 2.0], 7.0) == 2.0
    assert awaited([400, 200, 100], [2.0, 2.0, 2.0], 7.0) == 2.0 + 1.0
    assert awaited([1, 1, 1], [2.0, 2.0, 2.0], 0.0) == 6.0


def test_behind_the_backward_pass_only_the_last_is_left() -> None:
    rest = exposed((10.0, 20.0, 30.0), 30.0, BUCKETS, UPDATE)
    assert (
        rest.grad_reduce == 3 * 1.0 + 3.0 - 3.0
    )  # it arrives after 35 s, when two parts of the update have been made
    assert rest.gather == 2


SMALL = nn.Sequential(*(nn.Linear(300, 300, bias=False) for _ in range(4)))
M = ModelLayout.of(SMALL.named_parameters(), 4, 2, 1.0)
B = 300 * 300 * 4
ALPHA, INSIDE, ACROSS = 1e-7, 1e-9, 1e-8
"""Seconds per message, which are small here, and per byte that each host has to send."""


def link(kind: Kind, beta: float) -> Link:
    return Link(
        operation="any", kind=kind, alpha_seconds=(ALPHA,), beta_seconds_per_byte=(beta,), relative_error=0.0
    )


MACHINE = Machine(
    machine=About(hosts=4, ranks_per_host=2), link=(link("inside", INSIDE), link("across", ACROSS))
)


def near(seconds: float) -> object:
    return pytest.approx(seconds, rel=0.01)


def priced(method: Method) -> StepCost:
    return price(StepPlan.of(method), M, MACHINE, Computed(forward=0.0, backward=0.0))


def test_gradients_and_parameters_of_a_synchronous_step() -> None:
    cost = priced(bsp())
    grad_reduce, across = B * INSIDE, 2 * 3 / 4 * B * ACROSS
    assert cost.phases["grad_reduce"] == near(grad_reduce + 4 * across)
    assert cost.phases["param_gather"] == near(grad_reduce)
    assert cost.hidden == near(3 * grad_reduce + 3 * grad_reduce)


def test_parameters_of_a_synchronization() -> None:
    """They are gathered in every second step; in the other steps no data crosses groups."""
    grad_reduce = B * INSIDE
    assert priced(hierarchical(2)).phases["param_gather"] == near((grad_reduce + 4 * grad_reduce) / 2)
    assert priced(diloco(2)).phases["param_gather"] == near(4 * grad_reduce)  # w changes afterwards


def test_parameters_of_which_a_forward_pass_hides_all_but_the_first() -> None:
    """Each of the four gathers takes as long as a quarter of the pass."""
    grad_reduce = B * INSIDE
    computing = Computed(forward=4 * grad_reduce, backward=0.0)
    cost = price(StepPlan.of(bsp()), M, MACHINE, computing, prefetch=True)
    assert cost.phases["param_gather"] == near(grad_reduce)
    assert cost.phases["grad_reduce"] == near(grad_reduce + 4 * 2 * 3 / 4 * B * ACROSS)
    assert cost.hidden == near(3 * grad_reduce + 3 * grad_reduce)
