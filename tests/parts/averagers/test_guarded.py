"""Guarded averaging: which group is left out, the weights of the others, and what left-out groups get."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, optim

import hpcsgd
from checkpoint.test_snapshot import load, save
from hpcsgd.comm import Communicator, threads
from hpcsgd.core.topology import form
from hpcsgd.errors import UserError
from hpcsgd.methods import Method, delayed, diloco, hierarchical, streaming, switch
from hpcsgd.parts import quantizers
from hpcsgd.parts.averagers import AverageState, PseudoGradientPenalty
from hpcsgd.parts.averagers.pseudo_gradient_penalty import NormHistory, of_groups
from local_methods import moments
from ranks import RANK
from references import model, vector
from trainings import Training

PLAIN = PseudoGradientPenalty(temperature=math.inf)
BAD = 1
"""The group that diverges."""


@pytest.mark.parametrize("scale", [1e-6, 1.0, 100.0])
def test_weights_go_by_the_norms_over_their_median(scale: float) -> None:
    """They equal EDiT's at T = 1 and norms near 1, whatever the size of the model."""
    found = PseudoGradientPenalty().weights([scale * G for G in (1.0, 1.1, 0.9)])
    assert found == pytest.approx([0.3322, 0.3006, 0.3672], abs=1e-4)
    assert PseudoGradientPenalty().weights([scale, scale, 50 * scale])[2] < 1e-21
    assert PseudoGradientPenalty(temperature=2.0).weights([scale, scale, 3 * scale])[2] == pytest.approx(
        math.exp(-1) / (2 + math.exp(-1))
    )


def test_weights_of_norms_that_say_nothing() -> None:
    """Weights are equal at an infinite temperature, and if most groups did not move."""
    assert PLAIN.weights([1.0, 2.0, 30.0]) == [1 / 3] * 3
    assert PseudoGradientPenalty().weights([0.0, 0.0, 5.0]) == [1 / 3] * 3
    assert PseudoGradientPenalty().weights([7.0]) == [1.0]


def history(norms: Sequence[float], guard: PseudoGradientPenalty) -> NormHistory:
    found = NormHistory()
    for G in norms:
        found = found.including(G, guard)
    return found


def test_a_history_has_the_moments_of_all_norms() -> None:
    """The first 50 norms have equal weight."""
    norms = np.random.default_rng(0).normal(1.0, 0.05, 130).tolist()
    for n in (1, 2, 20, 50, 51, 130):
        found = history(norms[:n], PLAIN)
        assert (found.mean, found.variance) == pytest.approx(moments(norms[:n]), rel=1e-9)
        assert found.count == n
    assert history(norms[:50], PLAIN).mean == pytest.approx(np.mean(norms[:50]))


def test_synchronizations_without_training_hide_no_outlier() -> None:
    """Such as those in which another group returns: all norms are 0 there."""
    norms = np.random.default_rng(0).normal(1.0, 0.05, 20).tolist()
    past = history([0.0, *norms[:10], 0.0, *norms[10:], 0.0], PLAIN)
    assert past == history(norms, PLAIN)
    assert past.is_outlier(1.5, PLAIN)


def test_what_is_an_outlier() -> None:
    norms = np.random.default_rng(0).normal(1.0, 0.05, 20).tolist()
    past = history(norms, PLAIN)
    outliers = [G for G in (0.0, 0.5, 1.0, 1.1, 1.2, 2.0, math.inf, math.nan) if past.is_outlier(G, PLAIN)]
    assert outliers[:3] == [1.2, 2.0, math.inf]
    assert math.isnan(outliers[3])
    assert not past.is_outlier(1.2, PseudoGradientPenalty(threshold=6.0))
    young = history(norms[:19], PLAIN)
    assert not young.is_outlier(2.0, PLAIN)
    assert young.is_outlier(math.nan, PLAIN)
    assert young.is_outlier(2.0, PseudoGradientPenalty(warm_up=19))
    assert not history([1.0] * 30, PLAIN).is_outlier(2.0, PLAIN), "of norms without any spread"


def test_histories_of_another_number_of_groups_are_joined() -> None:
    norms = [[1.0, 2.0, 3.0], [5.0, 6.0, 7.0]]
    joined = of_groups([history(each, PLAIN) for each in norms], 3)
    assert len(joined) == 3
    assert joined[0].mean == pytest.approx(np.mean(norms))
    assert joined[0].variance == pytest.approx(np.var(norms))
    assert joined[0].count == 3
    new = NormHistory()
    assert of_groups([history([1.0, 2.0], PLAIN), new, new], 2)[1].mean == 1.5, "some had none"
    assert of_groups([new, new], 3) == [new] * 3


class Moved:
    """Groups that move by given changes, and then synchronize."""

    def __init__(
        self, world: Communicator, P: int, method: Method, dtype: torch.dtype = torch.float64
    ) -> None:
        self.topology, self.net = form(world, P), model(dtype=dtype)
        self.optimizer = hpcsgd.DistributedOptimizer(
            optim.SGD(self.net.parameters(), lr=1.0), self.net, self.topology, method, bucket_cap_mb=1e-4
        )

    @property
    def g(self) -> int:
        return self.topology.group_index

    @property
    def metrics(self) -> Any:
        return self.optimizer.metrics

    def by(self, change: Tensor | float) -> Tensor:
        """Change the group's model by `change`, equal on its ranks, and synchronize; return the model."""
        change = torch.as_tensor(change, dtype=torch.float64).expand(vector(self.net).numel())
        start = 0
        for p in self.net.parameters():
            p.grad = -change[start : start + p.numel()].view_as(p).to(p.dtype).clone()
            start += p.numel()
        self.optimizer.step()
        return vector(self.net)


NOT_FINITE = [math.nan, math.inf, -math.inf]
MAKERS: dict[str, Callable[[PseudoGradientPenalty], Method]] = {
    "plain": lambda guard: hierarchical(1, guard=guard),
    "in few bits": lambda guard: hierarchical(1, guard=guard, quantize=quantizers.int8(block=8)),
    "outside": lambda guard: diloco(1, lambda ws: optim.SGD(ws, lr=1.0), guard=guard),
}


@pytest.mark.threads(unless={"P": 2, "K": 2, "value": NOT_FINITE[0]})
@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize(("P", "K"), [(2, 1), (2, 2), (3, 1)])
@pytest.mark.parametrize("maker", MAKERS)
def test_who_is_not_finite_is_left_out(run, maker: str, P: int, K: int, value: float) -> None:
    """It is left out from the first synchronization on, and all groups get the mean of the others."""

    def one(world: Communicator) -> tuple[Tensor, dict[str, float]]:
        moved = Moved(world, P, MAKERS[maker](PLAIN))
        bad = torch.full((vector(moved.net).numel(),), 0.5, dtype=torch.float64)
        bad[3] = value
        found = moved.by(bad if moved.g == BAD else 1.0 + moved.g)
        return found - vector(model()), dict(moved.metrics)

    mean = float(np.mean([1.0 + g for g in range(P) if g != BAD]))
    for found, metrics in run(P * K, one):
        room = 0.05 if maker == "in few bits" else 1e-9
        torch.testing.assert_close(found, torch.full_like(found, mean), rtol=0, atol=room)
        assert metrics["groups_left_out"] == 1
        assert metrics["min_weight"] == pytest.approx(1 / (P - 1))
        D = math.sqrt(len(found)) if P == 3 else 0.0
        assert metrics["distance"] == pytest.approx(D, abs=room * math.sqrt(len(found))), "of the others"


@pytest.mark.parametrize(("P", "K"), [(3, 1), (2, 2)])
@pytest.mark.parametrize("maker", MAKERS)
def test_an_outlier_is_left_out_and_comes_back(run, caplog, maker: str, P: int, K: int) -> None:
    """It does not enter a history, so it stays an outlier as long as it lasts."""
    guard = PseudoGradientPenalty(temperature=math.inf, warm_up=5)
    caplog.set_level(logging.WARNING)

    def one(world: Communicator) -> list[float]:
        moved, found = Moved(world, P, MAKERS[maker](guard)), []
        for t in range(5):
            moved.by(1.0 + 0.01 * t)
        before = vector(moved.net)
        for change in (40.0, 40.0, 0.9):
            after = moved.by(change if moved.g == BAD else 1.0)
            found += [(after - before).mean().item(), moved.metrics["groups_left_out"]]
            before = after
        return found

    back = (P - 0.1) / P
    for found in run(P * K, one):
        assert found == pytest.approx([1.0, 1, 1.0, 1, back, 0], abs=0.01)
    told = [each.getMessage() for each in caplog.records if each.name == "hpcsgd.parts.averagers.guarded"]
    expected = [["step 6", f" group {BAD} is left out"], ["step 8", f" group {BAD} is averaged again"]]
    assert [line.split(":")[:2] for line in told] == (expected if RANK == 0 else [])


@pytest.mark.parametrize("value", [50.0, math.nan])
@pytest.mark.parametrize("quantize", [None, quantizers.int8()])
@pytest.mark.parametrize(("P", "K"), [(2, 2), (3, 1)])
def test_if_all_are_outliers_nobody_moves(run, P: int, K: int, quantize: Any, value: float) -> None:
    """Neither the model nor the outer momentum moves; in plain DiLoCo the momentum would decay."""
    guard = PseudoGradientPenalty(warm_up=3)

    def one(world: Communicator) -> tuple[Tensor, Tensor, bool, dict[str, float]]:
        moved = Moved(world, P, diloco(1, guard=guard, quantize=quantize))
        for t in range(3):
            before = moved.by(1.0 + 0.01 * t)
        state = moved.optimizer.method.state_dict()["averager"]
        after = moved.by(value)
        again = moved.optimizer.method.state_dict()["averager"]
        same = all(
            torch.equal(x, y)
            for name in state.sharded
            for x, y in zip(state.sharded[name], again.sharded[name], strict=True)
        )
        return before, after, same, dict(moved.metrics)

    for before, after, same, metrics in run(P * K, one):
        assert torch.equal(before, after)
        assert same
        assert (metrics["groups_left_out"], metrics["min_weight"], metrics["distance"]) == (P, 0, 0)


@pytest.mark.ranks(2)
def test_groups_that_are_all_outliers_are_not_so_for_ever(run) -> None:
    """As when the learning rate rises, a change that all groups make becomes the usual one."""

    def one(world: Communicator) -> list[float]:
        moved, out = Moved(world, 2, hierarchical(1, guard=PseudoGradientPenalty(warm_up=5))), []
        for t in range(30):
            moved.by((1.0 if t < 10 else 100.0) * (1 + 0.01 * (t % 3)))
            out.append(moved.metrics["groups_left_out"])
        return out

    for out in run(2, one):
        assert out[:10] == [0] * 10
        assert out[10] == 2
        assert out[18:] == [0] * 12


@pytest.mark.ranks(4)
def test_the_mean_change_is_clipped(run) -> None:
    def one(world: Communicator, most: float) -> Tensor:
        guard = PseudoGradientPenalty(temperature=math.inf, max_norm=most)
        moved = Moved(world, 2, hierarchical(1, guard=guard))
        return moved.by(1.0 + moved.g) - vector(model())

    M = vector(model()).numel()
    for most, norm in ((0.5, 0.5), (1e9, 1.5 * math.sqrt(M))):
        for found in run(4, one, most):
            assert found.norm().item() == pytest.approx(norm, rel=1e-5)
            assert (found > 0).all()


@pytest.mark.threads(unless={"P": 2, "K": 2})
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantize", [None, quantizers.int4(block=8)])
@pytest.mark.parametrize("name", ["hierarchical", "diloco"])
@pytest.mark.parametrize(("P", "K"), [(1, 2), (2, 2), (3, 1)])
def test_an_infinite_temperature_is_no_guard_bit_for_bit(
    run, name: str, quantize: Any, P: int, K: int, dtype: torch.dtype
) -> None:
    make = {"hierarchical": hierarchical, "diloco": diloco}[name]

    def both(world: Communicator) -> bool:
        found = []
        for guard in (None, PLAIN):
            topology, net = form(world, P), model(dtype=dtype)
            inner = optim.AdamW(net.parameters(), lr=0.01)
            method = make(2, quantize=quantize, guard=guard)
            optimizer = hpcsgd.DistributedOptimizer(inner, net, topology, method)
            for t in range(7):
                optimizer.zero_grad()
                x = torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * t + world.rank)).to(dtype)
                net(x).square().mean().backward()
                optimizer.step()
            found.append(vector(net))
        return torch.equal(*found)

    assert all(run(P * K, both))


LATE: dict[str, Callable[[Method], Method]] = {
    "delayed": lambda method: delayed(method, 2),
    "streaming": lambda method: streaming(method, 2, 1),
    "streaming without delay": lambda method: streaming(method, 2, 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("around", LATE)
@pytest.mark.parametrize(("P", "K"), [(2, 2), (3, 1)])
def test_who_is_left_out_of_a_late_average_takes_it_whole(run, around: str, P: int, K: int) -> None:
    """It keeps nothing else of its own, such as NaN, even if the pending average was saved and loaded."""

    def one(world: Communicator, resumed: int | None) -> tuple[Tensor, float]:
        def new() -> Moved:
            return Moved(world, P, LATE[around](hierarchical(4, guard=PLAIN)))

        moved, out = new(), 0.0
        for t in range(1, 14):
            moved.by(math.nan if moved.g == BAD and t == 4 else 0.1)
            out = max(out, moved.metrics.get("groups_left_out", 0.0))
            if t == resumed:
                state, weights, moved = moved.optimizer.state_dict(), moved.net.state_dict(), new()
                with torch.no_grad():
                    moved.net.load_state_dict(weights)
                moved.optimizer.load_state_dict(state)
        return vector(moved.net), out

    runs = [run(P * K, one, resumed) for resumed in (None, 5, 6)]
    for (found, out), *again in zip(*runs, strict=True):
        assert found.isfinite().all()
        assert out == 1
        assert all(torch.equal(found, resumed) for resumed, _ in again)


@pytest.mark.ranks(3)
def test_who_is_left_out_has_no_say_in_averaged_state(run) -> None:
    """A momentum that is not finite is left out, and its group gets that of the others."""

    def one(world: Communicator, bad: bool) -> Tensor:
        net, topology = model(), form(world, 3)
        inner = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        method = hierarchical(2, optimizer_state=AverageState, guard=PLAIN)
        optimizer = hpcsgd.DistributedOptimizer(inner, net, topology, method)
        for _ in range(2):
            for p in net.parameters():
                p.grad = torch.full_like(p, math.nan if bad and world.rank == BAD else 1.0 + world.rank)
            optimizer.step()
        return torch.cat([state["momentum_buffer"].reshape(-1) for state in optimizer.state.values()])

    for momentum in run(3, one, True):
        torch.testing.assert_close(momentum, torch.full_like(momentum, 1.9 * 2.0))
    for momentum in run(3, one, False):
        torch.testing.assert_close(momentum, torch.full_like(momentum, 1.9 * 2.0))


@pytest.mark.ranks(2)
def test_if_all_are_left_out_states_stay_as_they_are(run) -> None:
    def one(world: Communicator) -> tuple[Tensor, Tensor]:
        net, topology = model(), form(world, 2)
        inner = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        method = hierarchical(1, optimizer_state=AverageState, guard=PLAIN)
        optimizer = hpcsgd.DistributedOptimizer(inner, net, topology, method)
        for p in net.parameters():
            p.grad = torch.full_like(p, math.inf if world.rank else -math.inf)
        optimizer.step()
        return vector(net), torch.cat(
            [each["momentum_buffer"].reshape(-1) for each in optimizer.state.values()]
        )

    for rank, (found, momentum) in enumerate(run(2, one)):
        assert torch.equal(found, vector(model()))
        assert (momentum == (math.inf if rank else -math.inf)).all()


@pytest.mark.ranks(2)
def test_who_was_left_out_of_a_step_is_so_in_no_other(run) -> None:
    """The outer optimizer of a method without a guard steps, whatever the first method's guard did."""

    def one(world: Communicator) -> Tensor:
        moved = Moved(world, 2, switch(diloco(1, guard=PLAIN), diloco(1), at=1))
        moved.by(math.nan)
        return moved.by(1.0) - vector(model())

    for found in run(2, one):
        torch.testing.assert_close(found, torch.full_like(found, 0.7 * 1.9))


@pytest.mark.ranks(2)
def test_groups_that_have_trained_separately_synchronize_as_they_are(run) -> None:
    """No common model exists from which the groups have moved."""

    def one(world: Communicator) -> tuple[Tensor, dict[str, float]]:
        moved = Moved(world, 2, switch(hierarchical(99), hierarchical(1, guard=PLAIN), at=2))
        for _ in range(2):
            moved.by(1.0 + moved.g)
        moved.by(0.0)
        first = dict(moved.metrics)
        moved.by(math.nan if moved.g == BAD else 1.0)
        return vector(moved.net) - vector(model()), first

    for found, first in run(2, one):
        torch.testing.assert_close(found, torch.full_like(found, 4.0))
        assert "groups_left_out" not in first


@pytest.mark.parametrize(("before", "now"), [((2, 2), (4, 1)), ((4, 1), (2, 2)), ((2, 2), (2, 1))])
@pytest.mark.parametrize("late", [False, True])
def test_what_groups_are_used_to_is_known_on_another_shape(
    tmp_path, before: tuple[int, int], now: tuple[int, int], late: bool
) -> None:
    def new() -> Method:
        method = diloco(2, guard=PseudoGradientPenalty(warm_up=3))
        return streaming(method, 2, 1) if late else method

    def first(world: Communicator) -> None:
        training = Training(form(world, before[0]), "plain", new)
        training.steps(9)
        save(training, tmp_path)

    def then(world: Communicator) -> float:
        training = Training(form(world, now[0]), "plain", new, seed=1)
        load(training, tmp_path)
        found = 0.0
        for _ in range(3):
            if world.rank // now[1] == BAD:
                with torch.no_grad():
                    for p in training.net.parameters():
                        p.add_(10.0)
            training.steps(1)
            found = max(found, training.optimizer.metrics.get("groups_left_out", 0.0))
        return found

    threads.run(before[0] * before[1], first)
    found = threads.run(now[0] * now[1], then)
    assert found == [1.0] * len(found)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"threshold": 0.0}, "threshold = 0.0: expected a number > 0"),
        ({"warm_up": 1}, "warm_up = 1: expected a number of synchronizations ≥ 2"),
        ({"smoothing": 0.0}, "smoothing = 0.0: expected a number > 0 and ≤ 1"),
        ({"smoothing": 1.5}, "smoothing = 1.5: expected a number > 0 and ≤ 1"),
        ({"temperature": -1.0}, "temperature = -1.0: expected a number > 0"),
        ({"max_norm": 0.0}, "max_norm = 0.0: expected a norm > 0, or None"),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError) as refused:
        PseudoGradientPenalty(**arguments)
    assert str(refused.value) == told


@pytest.mark.parametrize("make", [hpcsgd.allreduce_local_sgd, hpcsgd.sgp, hpcsgd.fedavg])
def test_other_methods_refuse_it(make: Callable[..., Method]) -> None:
    with pytest.raises(UserError, match="guard") as refused:
        make(guard=PLAIN)
    assert "\n" not in str(refused.value)
