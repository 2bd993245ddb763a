"""Tests of streaming: fragments of the model that are averaged in turn."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import hpcsgd
from hpcsgd.comm import Communicator
from hpcsgd.core.flat import Bucket, flatten
from hpcsgd.core.optional import prepare
from hpcsgd.core.state import State
from hpcsgd.core.topology import form
from hpcsgd.methods import Method, bsp, delayed, diloco, hierarchical, streaming, switch
from hpcsgd.parts import quantizers
from hpcsgd.parts.averagers.fragments import fragments
from local_methods import NESTEROV, blended, in_turn, strides
from methods.test_battery import OPTIMIZERS
from methods.test_delayed import EVERY, MADE, distributed_by, trained
from methods.test_unused_parts import Branches
from ranks import RANK
from references import MakeOptimizer, alone, batch, distributed, loss, model, one_step, same, vector

I, STEPS = 4, 10  # noqa: E741 - the papers' letter
NEW: dict[str, tuple[Callable[[], Method], MakeOptimizer | None]] = {
    "hierarchical": (lambda: hierarchical(I), None),
    "diloco": (lambda: diloco(I), NESTEROV),
}


@pytest.mark.threads(unless={"P": 2, "K": 2, "F": 2, "tau": 2})
@pytest.mark.parametrize(("P", "K"), [(3, 1), (2, 2)])
@pytest.mark.parametrize(
    ("F", "tau", "alpha"), [(1, 2, 0.0), (1, 2, 0.5), (2, 0, 0.5), (2, 2, 0.0), (4, 2, 0.5), (4, 4, 0.5)]
)
@pytest.mark.parametrize("method", NEW)
def test_equals_plain_torch(run, method: str, F: int, tau: int, alpha: float, P: int, K: int) -> None:
    """With F·τ > I several fragments are pending at once.

    With τ = I each begins in the step in which the one before is applied.
    """
    make, (new, outer) = OPTIMIZERS["momentum"], NEW[method]

    def models(world: Communicator) -> list[Tensor]:
        return distributed(world, P, streaming(new(), F, tau, alpha), make, STEPS, bucket_cap_mb=3e-4)

    expected = alone(P, K, make, STEPS, in_turn(I, F, tau, blended(alpha), outer))
    same(run(P * K, models), expected, K)


@pytest.mark.threads(unless={"method": "diloco", "K": 2})
@pytest.mark.parametrize(("P", "K"), [(3, 1), (2, 2)])
@pytest.mark.parametrize("method", MADE)
def test_one_fragment_at_once_is_the_method_itself(run, method: str, P: int, K: int) -> None:
    new, _ = MADE[method]
    plain = run(P * K, distributed_by, P, new)
    whole = run(P * K, distributed_by, P, lambda: streaming(new(), 1, 0, 0.0))
    for mine, theirs in zip(whole, plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.ranks(8)
def test_positions_that_own_nothing_of_a_fragment(run) -> None:
    make, outer = OPTIMIZERS["SGD"], lambda params: optim.AdamW(params, lr=0.02)
    ranks = run(8, lambda w: distributed(w, 2, streaming(diloco(I, outer), 4, 1), make, STEPS))
    same(ranks, alone(2, 4, make, STEPS, in_turn(I, 4, 1, blended(0.5), outer)), 4)


@pytest.mark.ranks(8)
def test_packed_fragments_of_which_positions_own_nothing(run) -> None:
    """The average in 8 bits is close to the exact mean."""
    make = OPTIMIZERS["SGD"]
    packed = lambda: streaming(hierarchical(I, quantize=quantizers.int8()), 4, 1)  # noqa: E731
    ranks = run(8, lambda w: distributed(w, 2, packed(), make, STEPS))
    expected = alone(2, 4, make, STEPS, in_turn(I, 4, 1, blended(0.5)))
    for rank, history in enumerate(ranks):
        torch.testing.assert_close(history[-1], expected[-1][rank // 4], rtol=0, atol=1e-2)


def elements(net: nn.Module, K: int, bucket_bytes: float, F: int) -> list[list[tuple[str, int]]]:
    """Return the elements of each fragment, by parameter, over all ranks of a group."""
    found: list[list[tuple[str, int]]] = [[] for _ in range(F)]
    for j in range(K):
        buckets: list[Bucket] = flatten(list(net.named_parameters()), K, j, bucket_bytes)
        for p, fragment in enumerate(fragments(buckets, F)):
            for b, cuts in zip(buckets, fragment.cuts, strict=True):
                owners = [(piece.slot.name, i) for piece in b.ranges for i in range(piece.start, piece.stop)]
                found[p] += [owner for c in cuts for owner in owners[c]]
    return [sorted(each) for each in found]


@pytest.mark.parametrize("F", [1, 2, 3, 7])
@pytest.mark.parametrize("make", [model, Branches])
def test_every_element_is_in_one_fragment_whatever_the_shards(make: Callable[[], nn.Module], F: int) -> None:
    expected = elements(make(), 1, 1e9, F)
    whole = [(name, i) for name, p in make().named_parameters() for i in range(p.numel())]
    assert sorted(owner for each in expected for owner in each) == sorted(whole)
    assert max(map(len, expected)) <= 2 * math.ceil(len(whole) / F)
    for K, bucket_bytes in ((2, 1e9), (3, 200.0), (4, 1.0)):
        assert elements(make(), K, bucket_bytes, F) == expected
    for mine, theirs in zip(expected, strides(make(), F), strict=True):
        assert mine == sorted(whole[i] for i in theirs.tolist())


def test_layers_of_one_size_go_around() -> None:
    net = nn.Sequential(*(nn.Linear(3, 3) for _ in range(7)))
    found = elements(net, 2, 50.0, 3)
    layers = [sorted({int(name.split(".")[0]) for name, _ in each}) for each in found]
    assert layers == [[0, 3, 6], [1, 4], [2, 5]]


@pytest.mark.parametrize(("P", "K"), [(3, 1), (2, 2)])
def test_the_distance_is_that_of_all_fragments(run, P: int, K: int) -> None:
    """Each fragment counts once; if the groups do not move, the total is the distance of the whole model.

    This also holds where groups differ much in different parts of the model.
    """

    def noted(world: Communicator) -> tuple[list[dict[str, float]], Tensor]:
        topology, net = form(world, P), model()
        optimizer = hpcsgd.DistributedOptimizer(
            optim.SGD(net.parameters(), lr=0.0), net, topology, streaming(hierarchical(I), 2, 1, 0.0)
        )
        with torch.no_grad():
            for p in net.parameters():
                p.add_(
                    (torch.arange(p.numel(), dtype=p.dtype) % 5 + topology.group_index).sin().view_as(p)
                    * p.numel() ** topology.group_index
                )
        start, notes = vector(net), []
        for t in range(STEPS):
            one_step(net, optimizer, topology, t)
            notes.append(optimizer.metrics)
        return notes, start

    found = run(P * K, noted)
    groups = torch.stack([start for _, start in found[::K]])
    D = (groups - groups.mean(0)).norm(dim=1).mean().item()
    for notes, _ in found:
        assert [t for t, each in enumerate(notes, 1) if each] == [3, 5, 7, 9]
        assert notes[2] == {"grads_shared": 1.0}
        assert notes[4] == {"distance": pytest.approx(D, rel=1e-12)}
        assert notes[8]["distance"] < 1e-12 * D


@pytest.mark.ranks(4)
def test_a_link_carries_as_much_in_smaller_parts(run) -> None:
    def sent(world: Communicator, method: Method) -> list[float]:
        topology, net = form(world, 2), model()
        inner = optim.SGD(net.parameters(), lr=0.1)
        optimizer = hpcsgd.DistributedOptimizer(inner, net, topology, method)
        counts = []
        for t in range(2 * I):
            before = world.stats.totals()
            one_step(net, optimizer, topology, t)
            optimizer.method.state_dict()  # waits for pending averages
            grown = world.stats.since(before).get("model_average")
            counts.append(0.0 if grown is None else grown.bytes)
        return counts

    whole, parts = (
        [sum(ranks) for ranks in zip(*run(4, lambda world, m=method: sent(world, m())), strict=True)]
        for method in (lambda: hierarchical(I), lambda: streaming(hierarchical(I), 4, 2))
    )
    assert whole[:I] == [0, 0, 0, whole[I - 1]]
    assert sum(parts) == sum(whole)
    assert all(0 < nbytes < whole[I - 1] / 2 for nbytes in parts)


@pytest.mark.parametrize(("P", "K"), [(3, 1), (2, 2)])
@pytest.mark.parametrize("F", [1, 2, 4])
def test_streaming_diloco_of_4_bits_sends_its_formula(run, F: int, P: int, K: int) -> None:
    """In I steps each fragment is averaged once, with 4 bits per element and a scale per block.

    A rank sends a P-th of its part of the fragment to each other group, and as much of the mean back.
    """
    block, H = 8, 6

    def sent(world: Communicator) -> tuple[float, int]:
        topology, net = form(world, P), model(dtype=torch.float32)
        method = streaming(diloco(H, quantize=quantizers.int4(block=block)), F, 2)
        inner = optim.AdamW(net.parameters(), lr=0.01)
        optimizer = hpcsgd.DistributedOptimizer(inner, net, topology, method, bucket_cap_mb=2e-4)

        def train(steps: range) -> None:
            for t in steps:
                x, y = batch(t, topology.rank, torch.float32)
                optimizer.zero_grad()
                loss(net, x, y).backward()
                optimizer.step()
            optimizer.method.state_dict()  # waits for pending averages

        before = world.stats.totals()
        train(range(F * H))
        own = [b.param_shard for b in optimizer.buckets]
        owned = [x.numel() for cut in fragments(optimizer.buckets, F) for x in cut.of(own) if x.numel()]
        return world.stats.since(before)["model_average"].bytes, sum(map(formula, owned))

    def formula(n: int) -> int:
        part = -(-n // P)
        codes = 4 * -(-part // block) + -(-part // 2)
        return 2 * (P - 1) * (-(-codes // 4) * 4)  # padded to whole 4-byte words

    for nbytes, once in run(P * K, sent):
        assert nbytes == pytest.approx(F * once, rel=1e-12)


@pytest.mark.parametrize(("P", "K"), [(3, 1), (2, 2)])
def test_averaging_now_is_with_all_of_the_model(run, P: int, K: int) -> None:
    def ends(world: Communicator) -> tuple[Tensor, dict[str, float]]:
        optimizer, _, now = trained(world, streaming(hierarchical(EVERY), 2, 2), 4, P)
        optimizer.average_models()
        assert optimizer.method.state_dict()["averager"].replicated["due"] == [None, None]
        return now(), optimizer.metrics

    found = run(P * K, ends)
    for w, notes in found:
        assert torch.equal(w, found[0][0])
        assert notes == {"distance": found[0][1]["distance"]}


@pytest.mark.ranks(2)
def test_a_switch_takes_in_all_that_is_under_way(run) -> None:
    """In the last step before the switch one fragment is applied, and another one is still pending."""

    def ends(world: Communicator) -> tuple[Any, Tensor]:
        method = switch(streaming(hierarchical(I), 2, 3), bsp(), at=5)
        before = trained(world, method, 4)[0].method.state_dict()["averager.first.averager"].replicated["due"]
        assert before == [7, 5]
        method = switch(streaming(hierarchical(I), 2, 3), bsp(), at=5)
        optimizer, _, now = trained(world, method, 5)
        return optimizer.method.state_dict()["averager.first.averager"].replicated["due"], now()

    for due, w in (found := run(2, ends)):
        assert due == [None, None]
        assert torch.equal(w, found[0][1])


@pytest.mark.ranks(2)
def test_the_distance_goes_on(run) -> None:
    """A distance that is complete after a restart includes the fragments from before it."""

    def noted(world: Communicator) -> tuple[dict[str, float], dict[str, float]]:
        optimizer, *_ = trained(world, streaming(hierarchical(I), 2, 1), 6)
        before = copy.deepcopy((optimizer.model.state_dict(), optimizer.state_dict()))
        again, *_ = trained(world, streaming(hierarchical(I), 2, 1), 0)
        again.model.load_state_dict(before[0])
        again.load_state_dict(before[1])
        for t in range(6, 2 * I + 1):
            for each in (optimizer, again):
                one_step(each.model, each, each.topology, t)
        return optimizer.metrics, again.metrics

    for whole, resumed in run(2, noted):
        assert whole["distance"] > 0
        assert resumed == whole


@pytest.mark.ranks(2)
def test_goes_on_with_a_synchronization_that_takes_longer(run) -> None:
    """No other average of the fragment begins before the pending one is applied, 4 steps after its start."""

    def due(world: Communicator) -> list[Any]:
        state = trained(world, streaming(hierarchical(4), 1, 4), 4)[0].state_dict()
        again, *_ = trained(world, streaming(hierarchical(2), 1, 1), 0)
        again.load_state_dict(state)
        found = []
        for t in range(4, 9):
            one_step(again.model, again, again.topology, t)
            found += again.method.state_dict()["averager"].replicated["due"]
        return found

    assert run(2, due) == [[8, 8, 8, 9, None]] * 2


@pytest.mark.ranks(2)
def test_goes_on_with_other_fragments(run, caplog: pytest.LogCaptureFixture) -> None:
    """θ and its momentum are restored by element. Pending averages are dropped, with a warning."""
    caplog.set_level(logging.WARNING)

    def resumed(world: Communicator, F: int) -> tuple[Any, Any]:
        optimizer, *_ = trained(world, streaming(diloco(I), 2, 1), I)
        state = optimizer.state_dict()
        again, *_ = trained(world, streaming(diloco(I), F, 1), 0)
        again.load_state_dict(state)
        for p in again.model.parameters():
            p.grad = torch.zeros_like(p)
        again.step()
        before = State.from_dict(state["hpcsgd"]["method"]["averager"])
        return before, again.method.state_dict()["averager"]

    for before, after in run(2, resumed, 2):
        assert before.replicated["due"] == [I + 1, None]
        assert after.replicated["due"] == [None, None]
        assert all(map(torch.equal, before.sharded["averager theta"], after.sharded["averager theta"]))
    assert not caplog.records
    for before, after in run(2, resumed, 3):
        assert after.replicated["due"] == [None] * 3
        assert all(map(torch.equal, before.sharded["averager theta"], after.sharded["averager theta"]))
    assert ("pending averages are dropped" in caplog.text) == (RANK == 0)  # only rank 0 logs it


@pytest.mark.ranks(2)
@pytest.mark.parametrize("steps", [I - 1, I])
def test_goes_on_with_other_fragments_and_Adam_outside(
    run, caplog: pytest.LogCaptureFixture, steps: int
) -> None:
    """Adam's moments are restored if all fragments have been averaged; after I − 1 steps one has not."""
    caplog.set_level(logging.WARNING)

    def outside(params: Sequence[Tensor]) -> optim.Optimizer:
        return optim.Adam(params, lr=0.02)

    def resumed(world: Communicator) -> tuple[Any, Any, list[Tensor]]:
        optimizer, *_ = trained(world, streaming(diloco(I, outside), 2, 1), steps)
        state = optimizer.state_dict()
        again, _, now = trained(world, streaming(diloco(I, outside), 3, 1), 0)
        again.load_state_dict(state)
        for p in again.model.parameters():
            p.grad = torch.zeros_like(p)
        prepare(again.method.averager, again._step.shards, again._step)
        kept = again.method.state_dict()["averager"].sharded
        history = [one_step(again.model, again, again.topology, t) for t in range(steps, 3 * I)]
        return state["hpcsgd"]["method"]["averager"]["sharded"], kept, [*history, now()]

    for before, after, history in run(2, resumed):
        assert all(map(torch.equal, before["averager theta"], after["averager theta"]))
        assert ("averager outer exp_avg" in after) == (steps == I)
        if steps == I:
            assert all(map(torch.equal, before["averager outer exp_avg"], after["averager outer exp_avg"]))
        assert all(w.isfinite().all() for w in history)
    left_out = "outer exp_avg, averager outer exp_avg_sq, which not all fragments had" in caplog.text
    assert left_out == (RANK == 0 and steps < I)


@pytest.mark.ranks(2)
def test_delayed_and_streamed_differ_in_what_stays(run) -> None:
    """With α = 0 local progress is dropped: all groups are equal when the average is applied."""
    ends = [
        run(2, lambda w, m=method: distributed(w, 2, m(), OPTIMIZERS["SGD"], EVERY + 1))
        for method in (
            lambda: streaming(hierarchical(EVERY), 1, 1, 0.0),
            lambda: delayed(hierarchical(EVERY), 1),
        )
    ]
    assert torch.equal(ends[0][0][-1], ends[0][1][-1])
    assert not torch.equal(ends[1][0][-1], ends[1][1][-1])
