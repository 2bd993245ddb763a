"""Tests of a switch from one method to another."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, optim

import hpcsgd
from hpcsgd.comm import Communicator
from hpcsgd.core.optional import Late, finish
from hpcsgd.core.step import GroupGradReduce, quantized_gather
from hpcsgd.core.topology import form
from hpcsgd.errors import UserError
from hpcsgd.methods import (
    Method,
    allreduce_local_sgd,
    async_sgd,
    bsp,
    d_psgd,
    hierarchical,
    osgp,
    sgp,
    switch,
)
from hpcsgd.parts.grad_reduces import AllToAll, ReduceScatter, Sparse
from hpcsgd.parts.sparsifiers import Deft
from methods.table import RATES, REFERENCES, Case
from methods.test_battery import ENTRIES, OPTIMIZERS
from references import MakeOptimizer, distributed, follow, model, one_step, vector
from shapes import some

STEPS = 6


def takes_turns(method: Method) -> bool:
    """Return True if the method updates shards, as `hierarchical` does; both methods of a switch have to."""
    return method.grad_reduce.traits.leaves_shards and not method.averager.traits.whole_model


@pytest.mark.slow
@pytest.mark.threads(unless={"P": 2, "K": 2, "method": {"delayed", "diloco", "osgp"}})
@pytest.mark.parametrize(("P", "K"), some([(2, 2), (4, 1), (1, 2)], {(2, 2), (4, 1)}))
@pytest.mark.parametrize("method", [label for label, case in REFERENCES.items() if takes_turns(case.new())])
def test_never_and_at_once_are_the_methods_themselves(run, method: str, P: int, K: int) -> None:
    case = REFERENCES[method]
    make = OPTIMIZERS["SGD" if case.plain_sgd else "momentum"]
    alone = run(P * K, lambda world: distributed(world, P, case.new(), make, STEPS))
    for both in (
        lambda: switch(case.new(), hierarchical(2), STEPS + 1),
        lambda: switch(hierarchical(2), case.new(), 0),
    ):
        switched = run(P * K, lambda world, both=both: distributed(world, P, both(), make, STEPS))
        for mine, theirs in zip(switched, alone, strict=True):
            for w, expected in zip(mine, theirs, strict=True):
                torch.testing.assert_close(w, expected, rtol=0, atol=0 if case.same_bits else 1e-13)


@pytest.mark.parametrize(("P", "K"), [(2, 1), (4, 1), (3, 2)])
def test_groups_start_the_second_method_from_their_mean(run, P: int, K: int) -> None:
    """Messages of overlap SGP may still be pending; the mean is that of each group's model."""

    def models(world: Communicator) -> list[Tensor]:
        both = switch(osgp(2), bsp(), at=4)
        return distributed(world, P, both, OPTIMIZERS["SGD"], STEPS)

    ranks = run(P * K, models)
    assert any(not torch.equal(ranks[0][2], history[2]) for history in ranks)
    for history in ranks:
        for t in (3, 4, 5):
            torch.testing.assert_close(history[t], ranks[0][t], rtol=0, atol=1e-13)


def at_the_end(world: Communicator, method: Method, make: MakeOptimizer, steps: int, *, mean: bool) -> Tensor:
    """Return the model after so many steps: the groups' mean model, or this group's."""
    topology, net = form(world, 2), model()
    optimizer = hpcsgd.DistributedOptimizer(make(list(net.parameters())), net, topology, method)
    set_rate = follow(optimizer, RATES)
    for t in range(steps):
        set_rate(t)
        if mean and t == steps - 1 and isinstance(method.averager, Late):
            method.averager.begin = lambda *_: None  # type: ignore[method-assign]
        one_step(net, optimizer, topology, t)
    if not mean:
        return vector(net)
    with torch.no_grad():
        finish(method.averager, optimizer._vectors, optimizer._step, due=False)
    with optimizer.averaged_model():
        return vector(net)


@pytest.mark.threads(unless={"method": {"diloco", "sparseloco", "streaming", "sgp"}, "at": 4})
@pytest.mark.ranks(4)
@pytest.mark.parametrize("at", [3, 4, 5])
@pytest.mark.parametrize("method", [label for label, entry in ENTRIES.items() if entry.form is form])
def test_the_first_hands_over_the_mean_that_it_has(run, method: str, at: int) -> None:
    """The mean does not depend on whether groups are due to synchronize in that step.

    The first method's own averager runs only if they are.
    """
    entry = ENTRIES[method]
    make = OPTIMIZERS["SGD" if isinstance(entry, Case) and entry.plain_sgd else "momentum"]
    both = lambda: switch(entry.new(), entry.new(), at)  # noqa: E731
    found = run(4, lambda world: at_the_end(world, both(), make, at, mean=False))
    assert all(torch.equal(w, found[0]) for w in found)
    if (
        isinstance(entry, Case) and quantized_gather(entry.new().grad_reduce) is None
    ):  # otherwise the owner of a shard has more exact values
        (expected, *_) = run(4, lambda world: at_the_end(world, entry.new(), make, at, mean=True))
        torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-13)


def trained(world: Communicator, method: Method, rates: list[float], again: Method | None) -> list[bool]:
    """Return in which steps groups synchronized; halfway the state is loaded into `again`."""
    topology = form(world, groups=world.size)
    net = model()
    optimizer = hpcsgd.DistributedOptimizer(optim.SGD(net.parameters(), lr=1.0), net, topology, method)
    synced = []
    for t, lr in enumerate(rates):
        if again is not None and t == len(rates) // 2:
            state, weights = optimizer.state_dict(), {k: v.clone() for k, v in net.state_dict().items()}
            net = model()
            optimizer = hpcsgd.DistributedOptimizer(optim.SGD(net.parameters(), lr=1.0), net, topology, again)
            net.load_state_dict(weights)
            optimizer.load_state_dict(state)
        optimizer.param_groups[0]["lr"] = lr
        before = world.stats.totals()
        one_step(net, optimizer, topology, t)
        synced.append("model_average" in world.stats.since(before))
    return synced


DECAYING = [0.1, 0.1, 0.2, 0.2, 0.1, 0.1, 0.05, 0.05]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(("at", "expected"), [("first lr decay", [4, 5, 6, 7]), (2, [1, 2, 3, 4, 5, 6, 7])])
def test_when_the_groups_begin_to_synchronize(run, at: int | str, expected: list[int], again: bool) -> None:
    """BSP never synchronizes, SGP in every step; the step of the switch ends with the mean."""

    def synced(world: Communicator) -> list[int]:
        both, resumed = (switch(bsp(), sgp(), at) for _ in range(2))  # type: ignore[arg-type]
        steps = trained(world, both, DECAYING, resumed if again else None)
        return [t for t, did in enumerate(steps) if did]

    assert run(2, synced) == [expected, expected]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("at", [0, 3, 4])
def test_a_resumed_run_whose_switch_is_past_changes_at_once(run, at: int) -> None:
    def synced(world: Communicator) -> list[int]:
        steps = trained(world, switch(bsp(), sgp(), 7), DECAYING, switch(bsp(), sgp(), at))
        return [t for t, did in enumerate(steps) if did]

    assert run(2, synced) == [[4, 5, 6, 7]] * 2


@pytest.mark.ranks(2)
def test_a_state_of_other_methods_is_refused(run) -> None:
    def loaded(world: Communicator) -> None:
        topology = form(world, groups=2)
        first, second = (
            hpcsgd.DistributedOptimizer(optim.SGD(net.parameters(), lr=1.0), net, topology, method)
            for net, method in (
                (model(), switch(bsp(), sgp(), 3)),
                (model(), switch(bsp(), d_psgd(), 3)),
            )
        )
        second.load_state_dict(first.state_dict())

    with pytest.raises(
        UserError,
        match=r"state of another method: it is of averager, averager\.then\.averager, and this one needs",
    ):
        run(2, loaded)


def test_what_a_sparse_gradient_reduction_has_kept_is_dropped_aloud(caplog: pytest.LogCaptureFixture) -> None:
    sparse = lambda: bsp(Sparse(Deft(0.1)))  # noqa: E731
    for first in (sparse(), switch(sparse(), sparse(), 0)):
        caplog.clear()
        switch(first, sparse(), 3)
        assert "the error feedback of the first method is discarded" in caplog.text
    caplog.clear()
    switch(bsp(), bsp(), 3)
    assert not caplog.text


@pytest.mark.parametrize(("P", "K"), [(2, 2), (1, 4)])
@pytest.mark.parametrize("order", [(AllToAll(), ReduceScatter()), (ReduceScatter(), AllToAll())], ids=repr)
def test_gradient_reductions_that_need_rooms_of_unlike_size_take_turns(
    run, order: tuple[GroupGradReduce, GroupGradReduce], P: int, K: int
) -> None:
    def models(world: Communicator, new: Callable[[], Method]) -> list[Tensor]:
        return distributed(world, P, new(), OPTIMIZERS["momentum"], STEPS)

    alone = run(P * K, models, lambda: hierarchical(2))
    both = run(P * K, models, lambda: switch(*(hierarchical(2, each) for each in order), at=4))
    for mine, expected in zip(both, alone, strict=True):
        for w, v in zip(mine, expected, strict=True):
            torch.testing.assert_close(w, v, rtol=0, atol=1e-13)


def test_refusals() -> None:
    with pytest.raises(UserError, match=r"'first lr'.*expected a whole number or 'first lr decay'"):
        switch(bsp(), sgp(), "first lr")  # type: ignore[arg-type]
    for at in (-1, 1.5, True):
        with pytest.raises(UserError, match=r"expected a number of steps|expected a whole number"):
            switch(bsp(), sgp(), at)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="updates shards and the other one whole vectors"):
        switch(allreduce_local_sgd(3), async_sgd(), 3)
    with pytest.raises(UserError, match="as allreduce_local_sgd and sparse gradient reductions do"):
        switch(bsp(Sparse(Deft(0.1))), bsp(), 3)
