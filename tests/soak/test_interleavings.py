"""Methods whose ranks do not wait for each other, in orders of events drawn by a seed (see `stage`)."""

from __future__ import annotations

import functools
import random
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import hpcsgd
from hpcsgd.comm import Communicator, threads
from hpcsgd.core.topology import form
from hpcsgd.methods.ad_psgd import PairShard
from hpcsgd.methods.sgp import PushSum
from hpcsgd.parts.averagers.message_buffer import MessageBuffer
from hpcsgd.parts.averagers.parameter_server import ServerPart
from methods.table import EXCEPTIONS, REFERENCES, Case, Exempt
from methods.test_battery import OPTIMIZERS, trained
from references import model, one_step, same
from soak.conftest import Seeds
from soak.sizes import cases
from soak.stage import Stage, Stuck, staged

Run = Callable[..., list[Any]]
SHAPES = [(2, 1), (3, 1), (3, 1), (4, 1), (2, 2)]
ENTRIES = {**REFERENCES, **EXCEPTIONS}
LABELS = {
    "ssp": ["ssp", "ssp, nearly in step", "ssp without staleness"],
    "async_diloco": ["async_diloco", "async_diloco without staleness"],
    "async_sgd": ["async_sgd"],
    "heloco": ["heloco without corrections"],
    "ad_psgd": ["ad_psgd"],
    "osgp": ["osgp", "osgp on a ring"],
}


def in_turns(seed: int | str, orders: list[list[str]] | None = None, **limits: Any) -> Run:
    """Return a replacement for the fixture `run`, in which ranks sleep in simulated time."""

    def clock(stage: Stage) -> types.SimpleNamespace:
        return types.SimpleNamespace(sleep=stage.sleep)

    def run(n: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        with staged(seed, ("methods.invariants.time", clock), **limits) as stage:
            if orders is not None:
                orders.append(stage.order)
            return threads.run(n, function, *args)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("method", LABELS)
@cases(some=5, every=1000)
def test_in_any_order(seeds: Seeds, method: str, cases: int) -> None:
    def case(seed: int) -> None:
        chance = random.Random(f"{method} {seed}")
        label, (P, K) = chance.choice(LABELS[method]), chance.choice(SHAPES)
        chance.choice(checks(label))(in_turns(f"{method} {seed}"), label, P, K)

    seeds.each(cases, case)


def checks(label: str) -> list[Callable[[Run, str, int, int], None]]:
    """Return the checks that apply to an entry of the table."""
    entry = ENTRIES[label]
    invariants = [lambda run, _, P, K, holds=holds: holds(run, entry.new, P, K) for holds in entry.invariants]
    return [*invariants, *invariants, comes_to_something, *([weights_sum_up] if "osgp" in label else [])]


def comes_to_something(run: Run, label: str, P: int, K: int) -> None:
    """Check that results equal those of plain torch, if known, and are finite and equal within a group."""
    ranks = run(P * K, trained, P, ENTRIES[label], OPTIMIZERS["momentum"])
    for rank, history in enumerate(ranks):
        assert all(w.isfinite().all() for w in history)
        assert all(torch.equal(*pair) for pair in zip(history, ranks[rank - rank % K], strict=True))
    if label in REFERENCES:
        same(ranks, expected(label, P, K), K)


@functools.cache
def expected(label: str, P: int, K: int) -> list[list[Tensor]]:
    return REFERENCES[label].expected(P, K, OPTIMIZERS["momentum"])


def weights_sum_up(run: Run, label: str, P: int, K: int) -> None:
    """Check that the weights of groups and messages sum up to P, so that none is lost or counted twice."""
    for steps in (1, 2, 5):
        weights = run(P * K, weight_after, P, ENTRIES[label], steps)
        assert sum(weights[::K]) == pytest.approx(P, abs=1e-12)


def weight_after(world: Communicator, P: int, entry: Case | Exempt, steps: int) -> float:
    topology, net, method = form(world, P), model(), entry.new()
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = hpcsgd.DistributedOptimizer(inner, net, topology, method)
    for t in range(steps):
        one_step(net, optimizer, topology, t)
    assert isinstance(optimizer.method.averager, PushSum)
    own = optimizer.method.averager.state_dict().per_rank
    under_way = [MessageBuffer.restored(buffer).weight for sent in own["under_way"] for buffer in sent]
    return own["weight"] + sum(under_way)


@pytest.mark.parametrize("method", LABELS)
def test_the_same_number_gives_the_same_order(method: str) -> None:
    orders: list[list[str]] = []
    for seed in (5, 5, 6):
        in_turns(seed, orders)(3, trained, 3, ENTRIES[LABELS[method][0]], OPTIMIZERS["momentum"])
    first, again, other = orders
    assert first == again != other
    assert len(first) > 100


UPDATES, READS, WEIGHTS = 0, 1, -1
"""Indices into the result of `checks`."""


def found(label: str, P: int, which: int, within: int = 100) -> bool:
    """Return True if one of the checks fails in any of `within` orders."""
    for seed in range(within):
        try:
            checks(label)[which](in_turns(seed, often=0.3), label, P, 1)
        except AssertionError:
            return True
    return False


def test_a_server_that_lets_groups_run_too_far_is_found() -> None:
    def may_read(keeper: ServerPart, group: int) -> bool:
        return keeper.staleness is None or keeper.ahead(group) <= keeper.staleness + 1

    with mock.patch.object(ServerPart, "_may_read", may_read):
        assert found("ssp", 3, READS)


@pytest.mark.long
def test_pairs_without_a_lock_are_found() -> None:
    class Open:
        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    unlocked = property(lambda _: Open(), lambda *_: None)
    with mock.patch.object(PairShard, "_lock", unlocked, create=True):
        assert found("ad_psgd", 3, UPDATES)


def test_shares_that_are_lost_are_found() -> None:
    """The planted mistake drops messages that arrive late."""
    take_in = PushSum._take_in

    def forgets(how: PushSum, x: list[Tensor], sent: Any) -> None:
        if sent.work is not None and not sent.work.done():
            sent.wait()
        else:
            take_in(how, x, sent)

    with mock.patch.object(PushSum, "_take_in", forgets):
        assert found("osgp on a ring", 3, WEIGHTS)


def test_who_waits_for_ever_is_found_at_once() -> None:
    def one_waits(world: Communicator) -> None:
        if world.rank == 0:
            world.recv(torch.zeros(1), 1).wait()

    with pytest.raises(Exception, match="rank 1 has left, and rank 0 waits for it in recv"):
        in_turns(0)(2, one_waits)
    with pytest.raises(Stuck, match="everybody waits for somebody else"), staged(0) as stage:
        stage.wait(lambda: False)
