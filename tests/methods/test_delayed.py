"""Tests of synchronizations whose result is applied some steps after they begin."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, optim

import hpcsgd
from hpcsgd.comm import Communicator, PeerLost, threads
from hpcsgd.core.averager import Averager, Traits, run_averager
from hpcsgd.core.step import StepContext
from hpcsgd.core.topology import Topology, form
from hpcsgd.core.waits import All
from hpcsgd.errors import UserError
from hpcsgd.methods import (
    Method,
    adacomm,
    allreduce_local_sgd,
    bsp,
    d_psgd,
    delayed,
    diloco,
    ensemble_sync,
    fedavg,
    hierarchical,
    sasgd,
    selsync,
    sgp,
    ssp,
    streaming,
    switch,
)
from hpcsgd.methods.selsync import gradients
from hpcsgd.parts import quantizers
from hpcsgd.parts.averagers import AverageState, Mean, ResetState
from hpcsgd.parts.averagers.pending_average import on_own_thread, step_on_own_thread
from hpcsgd.parts.grad_reduces import AllToAll, Sparse
from hpcsgd.parts.schedules import Every
from hpcsgd.parts.sparsifiers import Deft
from local_methods import NESTEROV, carried, in_turn
from methods.table import OF_INTERVALS
from methods.test_battery import OPTIMIZERS
from references import MakeOptimizer, alone, distributed, model, one_step, same, vector
from sparsifying import deft, sparsified

EVERY, STEPS = 3, 10
MADE: dict[str, tuple[Callable[[], Method], MakeOptimizer | None]] = {
    "hierarchical": (lambda: hierarchical(EVERY), None),
    "diloco": (lambda: diloco(EVERY), NESTEROV),
}
OF_SHARDS: dict[str, Callable[[], Method]] = {
    "adacomm": lambda: adacomm(2, adapt_every=2),
    "d_psgd": d_psgd,
    "fedavg": lambda: fedavg(0.5, per_epoch=2, steps_per_epoch=5),
    **{name: partial(make, EVERY) for name, make in OF_INTERVALS.items()},
    "packed": lambda: hierarchical(EVERY, quantize=quantizers.int4()),
    "packed diloco": lambda: diloco(EVERY, quantize=quantizers.int8()),
    "selsync": lambda: selsync(0.3, window=4, smoothing=0.5),
}


@pytest.mark.threads(unless={"P": 2, "K": 2, "d": 3})
@pytest.mark.parametrize(("P", "K"), [(3, 1), (2, 2)])
@pytest.mark.parametrize("d", [1, 3])
@pytest.mark.parametrize("method", MADE)
def test_what_was_learned_meanwhile_stays(run, method: str, d: int, P: int, K: int) -> None:
    """With d = I each synchronization begins in the step in which the one before is applied, after that."""
    make, (new, outer) = OPTIMIZERS["momentum"], MADE[method]
    ranks = run(P * K, lambda w: distributed(w, P, delayed(new(), d), make, STEPS, bucket_cap_mb=1e-4))
    same(ranks, alone(P, K, make, STEPS, in_turn(EVERY, 1, d, carried, outer)), K)


class OnCopies:
    """An averager that runs `inner` on copies of the shards, with communicators on their own thread."""

    traits = Traits(All())

    def __init__(self, inner: Averager) -> None:
        self.inner = inner
        self._apart: Topology | None = None

    def average(self, vectors: Iterable[Tensor], s: StepContext) -> list[Tensor]:
        self._apart = self._apart or on_own_thread(s.topology)
        found = list(vectors)
        copies = [own.clone() for own in found]
        run_averager(self.inner, copies, step_on_own_thread(s, self._apart))
        for own, copied in zip(found, copies, strict=True):
            own.copy_(copied)
        return found


@pytest.mark.slow
@pytest.mark.threads(unless={"method": "diloco", "K": 2})
@pytest.mark.parametrize(("P", "K"), [(3, 1), (2, 2)])
@pytest.mark.parametrize("method", OF_SHARDS)
def test_whose_averages_go_by_shards_may_be_given_copies(run, method: str, P: int, K: int) -> None:
    def with_copies() -> Method:
        made = OF_SHARDS[method]()
        return Method(made.grad_reduce, made.schedule, OnCopies(made.averager))

    plain = run(P * K, distributed_by, P, OF_SHARDS[method])
    copied = run(P * K, distributed_by, P, with_copies)
    for mine, theirs in zip(copied, plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_without_delay_it_is_the_method_itself() -> None:
    method = hierarchical(EVERY)
    assert delayed(method, 0) is method


@pytest.mark.parametrize(("P", "K"), [(3, 1), (2, 2)])
@pytest.mark.parametrize(
    "new", [lambda: delayed(diloco(EVERY), 2), lambda: streaming(diloco(EVERY), 2, 2)], ids=["whole", "parts"]
)
def test_an_evaluation_is_of_the_mean_of_what_groups_train_on(
    run, new: Callable[[], Method], P: int, K: int
) -> None:
    """The distance D is that of the groups from this mean; a pending synchronization continues."""

    def evaluated(world: Communicator) -> tuple[Tensor, Tensor, float, list[Any]]:
        optimizer, _, now = trained(world, new(), EVERY + 1, P)
        mine = now()
        with optimizer.averaged_model() as D:
            inside = now()
        assert torch.equal(now(), mine)
        return mine, inside, D, optimizer.method.state_dict()["averager"].replicated["due"]

    found = run(P * K, evaluated)
    groups = torch.stack([mine for mine, *_ in found[::K]]).numpy()
    mean = groups.mean(0)
    D = np.sqrt(((groups - mean) ** 2).sum(1)).mean()
    for _, inside, noted, due in found:
        np.testing.assert_allclose(inside.numpy(), mean, rtol=0, atol=1e-12)
        assert noted == pytest.approx(D, rel=1e-12)
        assert due in (EVERY + 2, [EVERY + 2, None])  # a synchronization is pending


@pytest.mark.ranks(4)
def test_with_a_sparse_gradient_reduction(run) -> None:
    """Each rank updates the whole model; a result consists of shards, which the group gathers."""
    new = lambda: delayed(hierarchical(EVERY, Sparse(Deft(0.2))), 2)  # noqa: E731
    expected = sparsified(2, 2, deft(0.2), OPTIMIZERS["SGD"], STEPS, in_turn(EVERY, 1, 2, carried))
    same(run(4, lambda world: distributed(world, 2, new(), OPTIMIZERS["SGD"], STEPS)), expected, 2)


def distributed_by(world: Communicator, P: int, new: Callable[[], Method]) -> list[Tensor]:
    return distributed(world, P, new(), OPTIMIZERS["momentum"], STEPS)


def trained(
    world: Communicator, method: Method, steps: int, P: int = 2
) -> tuple[hpcsgd.DistributedOptimizer, list[dict[str, float]], Callable[[], Tensor]]:
    """Return the steps made, what was recorded in each, and the parameters."""
    topology, net = form(world, P), model()
    inner = optim.SGD(net.parameters(), lr=0.1)
    optimizer = hpcsgd.DistributedOptimizer(inner, net, topology, method)
    notes = []
    for t in range(steps):
        one_step(net, optimizer, topology, t)
        notes.append(optimizer.metrics)
    return optimizer, notes, lambda: vector(net)


@pytest.mark.ranks(4)
def test_a_synchronization_counts_once_and_has_the_distance_of_its_beginning(run) -> None:
    plain = run(4, lambda world: trained(world, hierarchical(EVERY), STEPS)[1])
    late = run(4, lambda world: trained(world, delayed(hierarchical(EVERY), 2), STEPS)[1])
    for noted, at_once in zip(late, plain, strict=True):
        assert [t for t, notes in enumerate(noted, 1) if notes] == [5, 8]
        assert noted[4] == at_once[2]
        assert noted[7].keys() == {"distance"}


@pytest.mark.ranks(2)
def test_one_that_falls_due_while_another_is_under_way_is_left_out(run) -> None:
    noted = run(2, lambda world: trained(world, delayed(selsync(0.0), 3), STEPS)[1])
    for notes in noted:
        assert [t for t, each in enumerate(notes, 1) if "distance" in each] == [4, 7, 10]


@pytest.mark.parametrize(("P", "K"), [(3, 1), (2, 2)])
def test_averaging_now_takes_in_what_is_under_way(run, P: int, K: int) -> None:
    def ends(world: Communicator) -> tuple[Tensor, Tensor]:
        optimizer, _, now = trained(world, delayed(hierarchical(EVERY), 2), 4, P)
        mean = now()
        optimizer.topology.inter_group.allreduce(mean, "mean").wait()
        optimizer.average_models()
        assert optimizer.method.state_dict()["averager"].replicated["due"] is None
        return mean, now()

    found = run(P * K, ends)
    for mean, w in found:
        torch.testing.assert_close(w, mean, rtol=0, atol=1e-12)  # the mean stays
        torch.testing.assert_close(w, found[0][1], rtol=0, atol=0)


@pytest.mark.ranks(3)
def test_a_switch_takes_in_what_is_under_way(run) -> None:
    both = lambda: switch(delayed(diloco(EVERY), 2), bsp(), at=4)  # noqa: E731
    ranks = run(3, lambda world: distributed(world, 3, both(), OPTIMIZERS["SGD"], STEPS))
    assert any(not torch.equal(ranks[0][2], history[2]) for history in ranks)
    for history in ranks:
        for t in range(3, STEPS):
            torch.testing.assert_close(history[t], ranks[0][t], rtol=0, atol=1e-13)


class Held:
    """A mean that begins only when the test allows it."""

    traits = Traits(All(), vectors_only=True)

    def __init__(self, may: threading.Event) -> None:
        self.may = may

    def average(self, vectors: Iterable[Tensor], s: StepContext) -> Iterable[Tensor]:
        assert self.may.wait(60)
        return Mean().average(vectors, s)


@pytest.mark.ranks(4)
def test_gradients_do_not_wait_for_a_synchronization(run) -> None:
    """Two steps reduce their gradients before the synchronization begins; it still averages w_t."""

    def trained_meanwhile(world: Communicator) -> list[Tensor]:
        may = threading.Event()
        topology, net = form(world, 2), model()
        method = delayed(Method(AllToAll(), Every(4), Held(may)), 3)
        optimizer = hpcsgd.DistributedOptimizer(
            OPTIMIZERS["SGD"](list(net.parameters())), net, topology, method
        )
        history = [one_step(net, optimizer, topology, t) for t in range(6)]
        may.set()
        return [*history, one_step(net, optimizer, topology, 6)]

    expected = alone(2, 2, OPTIMIZERS["SGD"], 7, in_turn(4, 1, 3, carried))
    same(run(4, trained_meanwhile), expected, 2)


class Broken:
    """An averager that fails on one rank, at its second synchronization."""

    traits = Traits(All(), vectors_only=True)

    def __init__(self, rank: int) -> None:
        self.rank, self.syncs = rank, 0

    def average(self, vectors: Iterable[Tensor], s: StepContext) -> Iterable[Tensor]:
        self.syncs += 1
        if self.syncs == 2 and s.topology.rank == self.rank:
            raise OSError("the link is down")
        return Mean().average(vectors, s)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_fault_in_a_synchronization_under_way_ends_all(world_size: int) -> None:
    reached = []

    def train(world: Communicator) -> None:
        try:
            trained(world, delayed(Method(AllToAll(), Every(2), Broken(1)), 2), 20, world.size)
        except (OSError, PeerLost) as error:
            reached.append(type(error))
            raise

    with pytest.raises(OSError, match="the link is down"):
        threads.run(world_size, train, timeout=10)
    assert len(reached) == world_size


def test_a_rank_that_dies_while_a_synchronization_is_under_way_ends_all() -> None:
    reached = []
    stepped = threading.Barrier(4)  # the communicator's own may break while a rank leaves it

    def train(world: Communicator) -> None:
        optimizer, *_ = trained(world, delayed(hierarchical(2), 2), 3)
        stepped.wait(60)
        if world.rank == 1:
            raise OSError("out of memory")
        try:
            optimizer.averaged_model().__enter__()
        except PeerLost:
            reached.append(world.rank)
            raise

    with pytest.raises(OSError, match="out of memory"):
        threads.run(4, train, timeout=10)
    assert 0 in reached


NOT_OF_SHARDS: list[Callable[[], Method]] = [
    lambda: hierarchical(2, optimizer_state=AverageState),
    lambda: hierarchical(2, optimizer_state=ResetState),
    lambda: allreduce_local_sgd(2),
    lambda: ensemble_sync(2),
    lambda: sasgd(2),
    sgp,
    lambda: ssp(1),
    lambda: selsync(0.3, gradients),
    lambda: switch(bsp(), hierarchical(2), at=3),
    lambda: delayed(hierarchical(2), 1),
    lambda: streaming(hierarchical(2), 1, 1),
]


@pytest.mark.parametrize("new", NOT_OF_SHARDS)
@pytest.mark.parametrize("wrap", [lambda m: delayed(m, 1), lambda m: streaming(m, 1, 1)])
def test_what_averages_need_more_than_shards(new: Callable[[], Method], wrap: Any) -> None:
    with pytest.raises(UserError, match="this method needs more than a rank's shards"):
        wrap(new())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: delayed(hierarchical(2), -1), "sync_delay = -1: expected a number of steps ≥ 0"),
        (lambda: delayed(hierarchical(2), 1.5), "sync_delay = 1.5: expected a whole number"),  # type: ignore[arg-type]
        (
            lambda: delayed(hierarchical(2), 3),
            "sync_delay = 3: expected 0 to 2, the steps between synchronizations",
        ),
        (lambda: delayed(bsp(), 1), "delayed: groups of this method never average"),
        (lambda: streaming(bsp(), 1, 1), "streaming: groups of this method never average"),
        (lambda: streaming(selsync(0.3), 1, 1), "streaming: this method has no fixed number of steps"),
        (lambda: streaming(hierarchical(2), 3, 1), "num_fragments = 3: expected 1 to 2"),
        (lambda: streaming(hierarchical(2), 0, 1), "num_fragments = 0: expected 1 to 2"),
        (lambda: streaming(hierarchical(2), 2, 3), "sync_delay = 3: expected 0 to 2"),
        (lambda: streaming(hierarchical(2), 2, 1, 1.0), "update_alpha = 1.0: expected a number ≥ 0 and < 1"),
    ],
)
def test_refusals(make: Callable[[], Method], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)
