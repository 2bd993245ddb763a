"""SelSync is compared with its definition in plain torch: which changes are significant, what is averaged."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor, nn, optim

import hpcsgd
from hpcsgd.comm import Communicator
from hpcsgd.core.step import StepContext, TrainingContext
from hpcsgd.core.topology import form
from hpcsgd.errors import UserError
from hpcsgd.methods import Method, bsp, hierarchical, selsync
from hpcsgd.methods.selsync import LARGEST, RelativeChange, Significance, gradients, parameters
from hpcsgd.parts.averagers import AverageState
from local_methods import changes, selective
from references import (
    MakeOptimizer,
    big_batch,
    distributed,
    local_sgd,
    model,
    one_step,
)

STEPS = 9
WINDOW, SMOOTHING = 4, 0.3
INFINITY = float("inf")
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD": lambda params: optim.SGD(params, lr=0.3),
    "momentum": lambda params: optim.SGD(params, lr=0.1, momentum=0.9),
    "AdamW": lambda params: optim.AdamW(params, lr=0.01),
}
SHAPES = [(2, 1), (2, 2), (4, 1), (1, 4)]


@given(st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=12))
def test_the_change_is_that_of_a_moving_average(norms: list[float]) -> None:
    change = RelativeChange(WINDOW, SMOOTHING)
    found = [change(torch.tensor([norm, 1.0], dtype=torch.float64)) for norm in norms]
    assert found[0].tolist() == [LARGEST, LARGEST]
    torch.testing.assert_close(
        torch.stack(found[1:])[:, 0], torch.tensor(changes(norms, WINDOW, SMOOTHING), dtype=torch.float64)
    )
    torch.testing.assert_close(torch.stack(found[1:])[:, 1], torch.zeros(len(norms) - 1, dtype=torch.float64))


def test_without_memory_it_is_the_change_of_the_norm() -> None:
    change = RelativeChange(25, 1.0)
    found = [change(torch.tensor([norm], dtype=torch.float64)).item() for norm in (4.0, 1.0, 0.0, 0.0, 2.0)]
    assert found == [LARGEST, 0.75, 1.0, 0.0, LARGEST]


def noted(
    world: Communicator, P: int, method: Method, make: MakeOptimizer
) -> list[tuple[Tensor, dict[str, float]]]:
    """Return the parameters and metrics of each step on this rank."""
    topology = form(world, groups=P)
    net = model(seed=world.rank)
    optimizer = hpcsgd.DistributedOptimizer(make(list(net.parameters())), net, topology, method)
    return [(one_step(net, optimizer, topology, t), dict(optimizer.metrics)) for t in range(STEPS)]


BY = {"parameters": parameters, "gradients": gradients}


@pytest.mark.threads(unless={"P": 2, "K": 2, "optimizer": "AdamW"})
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize(("P", "K"), [(2, 1), (2, 2), (4, 1)])
def test_equals_algorithm_1(run, P: int, K: int, by: str, optimizer: str) -> None:
    """In addition, every rank synchronizes in the same steps: in some, but not in all."""
    make, delta = OPTIMIZERS[optimizer], 0.3
    method = lambda: selsync(delta, BY[by], WINDOW, SMOOTHING)  # noqa: E731
    ranks = run(P * K, lambda world: noted(world, P, method(), make))
    groups, synced = selective(P, K, delta, by, make, STEPS, WINDOW, SMOOTHING)
    assert 1 < sum(synced) < STEPS
    for rank, history in enumerate(ranks):
        assert [notes["synced"] for _, notes in history] == synced
        for t, (w, notes) in enumerate(history):
            torch.testing.assert_close(w, groups[t][rank // K], rtol=0, atol=1e-12)
            assert notes["wants_sync"] == (notes["delta"] >= delta)
            assert notes["synced"] == any(theirs[t][1]["wants_sync"] for theirs in ranks)
            assert ("distance" in notes) == (synced[t] and by == "parameters")


@pytest.mark.slow
@pytest.mark.threads(unless={"P": 2, "K": 2, "optimizer": "AdamW"})
@pytest.mark.parametrize(("P", "K"), SHAPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_with_delta_0_all_steps_are_shared(run, P: int, K: int, optimizer: str) -> None:
    """With gradients, SelSync has the bits of BSP; with parameters, those of local SGD with interval 1.

    Where the update is linear in the gradient, the latter equals BSP up to rounding.
    """
    make = OPTIMIZERS[optimizer]

    def same(world: Communicator) -> bool:
        pairs = [(selsync(0, gradients), bsp()), (selsync(0), hierarchical(1))]
        return all(
            all(map(torch.equal, *(distributed(world, P, method, make, STEPS) for method in pair)))
            for pair in pairs
        )

    assert all(run(P * K, same))
    if optimizer != "AdamW":
        for history in run(P * K, lambda world: distributed(world, P, selsync(0), make, STEPS)):
            torch.testing.assert_close(history, big_batch(P * K, make, STEPS), rtol=0, atol=1e-12)


@pytest.mark.threads(unless={"P": 2, "K": 2})
@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize(("P", "K"), SHAPES)
def test_with_delta_infinity_no_group_synchronizes(run, P: int, K: int, by: str) -> None:
    """The result has the bits of local SGD before its first synchronization."""
    make = OPTIMIZERS["momentum"]

    def same(world: Communicator) -> bool:
        alone = distributed(world, P, hierarchical(STEPS + 1), make, STEPS)
        return all(map(torch.equal, alone, distributed(world, P, selsync(INFINITY, BY[by]), make, STEPS)))

    assert all(run(P * K, same))
    ranks = run(P * K, lambda world: distributed(world, P, selsync(INFINITY, BY[by]), make, STEPS))
    for t, groups in enumerate(local_sgd(P, K, STEPS + 1, make, STEPS)):
        for rank, history in enumerate(ranks):
            torch.testing.assert_close(history[t], groups[rank // K], rtol=0, atol=1e-12)


@pytest.mark.ranks(2)
def test_no_change_at_all_is_as_much_as_delta_0(run) -> None:
    def synced(world: Communicator) -> list[float]:
        topology = form(world, groups=2)
        net = model()
        optimizer = hpcsgd.DistributedOptimizer(
            optim.SGD(net.parameters(), lr=0.0), net, topology, selsync(0)
        )
        return [
            optimizer.metrics["synced"] for _ in range(4) if one_step(net, optimizer, topology, 0) is not None
        ]

    assert run(2, synced) == [[1.0] * 4] * 2


@pytest.mark.ranks(2)
def test_optimizer_state_may_be_averaged_too(run) -> None:
    make = OPTIMIZERS["momentum"]
    same = lambda world: all(  # noqa: E731
        map(
            torch.equal,
            distributed(world, 2, selsync(0, optimizer_state=AverageState), make, STEPS),
            distributed(world, 2, hierarchical(1, optimizer_state=AverageState), make, STEPS),
        )
    )
    assert all(run(2, same))


class Patient(optim.SGD):
    """An SGD whose update waits until the gathered numbers are there, so they must travel meanwhile."""

    significance: Significance

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        deadline = time.monotonic() + 20
        while not (gathering := self.significance._gathering) or not gathering.done():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        super().step(closure)


@pytest.mark.ranks(4)
def test_numbers_travel_while_the_update_is_made(run) -> None:
    def train(world: Communicator) -> list[Tensor]:
        method = selsync(0.3)

        def make(params: list[nn.Parameter]) -> optim.Optimizer:
            optimizer = Patient(params, lr=0.1)
            assert isinstance(method.schedule, Significance)
            optimizer.significance = method.schedule
            return optimizer

        return distributed(world, 2, method, make, 3, elementwise=True)

    assert len(run(4, train)) == 4


@pytest.mark.ranks(4)
def test_a_rank_gathers_8_bytes_from_every_other(run) -> None:
    def sent(world: Communicator) -> float:
        distributed(world, 2, selsync(INFINITY), OPTIMIZERS["SGD"], STEPS)
        return world.stats.totals()["sync_decision"].bytes

    assert run(4, sent) == [STEPS * 3 * 8] * 4


@pytest.mark.parametrize(("P", "K"), [(2, 1), (2, 2), (4, 1), (3, 2)])
def test_smoothing_follows_the_number_of_groups(run, P: int, K: int) -> None:
    """The paper's N/100 becomes P/100: its workers are groups here, however many ranks a group has."""

    def deltas(world: Communicator, smoothing: float | None) -> list[float]:
        history = noted(world, P, selsync(0.3, smoothing=smoothing), OPTIMIZERS["SGD"])
        return [notes["delta"] for _, notes in history]

    ours = run(P * K, deltas, None)
    assert ours == run(P * K, deltas, P / 100)
    assert all(a != b for a, b in zip(ours, run(P * K, deltas, (P * K + 1) / 100), strict=True))
    assert K == 1 or all(a != b for a, b in zip(ours, run(P * K, deltas, P * K / 100), strict=True))


@pytest.mark.slow
@pytest.mark.threads(unless={"P": 2, "K": 1})
@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize(("P", "K"), [(2, 1), (2, 2), (4, 1)])
def test_a_resumed_run_votes_as_the_uninterrupted_one(run, P: int, K: int, by: str) -> None:
    """A state saved after any step contains the moving average.

    Without it there would be no Δ, and the groups would synchronize.
    """

    def history(world: Communicator, saved_at: int) -> list[tuple[Tensor, dict[str, float]]]:
        topology = form(world, groups=P)

        def new() -> tuple[nn.Module, hpcsgd.DistributedOptimizer]:
            net = model()
            inner = OPTIMIZERS["momentum"](list(net.parameters()))
            method = selsync(0.3, BY[by], WINDOW, SMOOTHING)
            return net, hpcsgd.DistributedOptimizer(inner, net, topology, method)

        net, optimizer = new()
        rows = []
        for t in range(STEPS):
            if t == saved_at:
                weights, state = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
                for _ in range(2):  # the second time, the loaded state is saved again, unused
                    net, optimizer = new()
                    net.load_state_dict(weights)
                    optimizer.load_state_dict(state)
                    state = copy.deepcopy(optimizer.state_dict())
            rows.append((one_step(net, optimizer, topology, t), dict(optimizer.metrics)))
        return rows

    whole = run(P * K, history, STEPS)
    for saved_at in range(1, STEPS):
        for resumed, uninterrupted in zip(run(P * K, history, saved_at), whole, strict=True):
            assert [notes for _, notes in resumed] == [notes for _, notes in uninterrupted]
            assert all(torch.equal(a, b) for (a, _), (b, _) in zip(resumed, uninterrupted, strict=True))
    synced = [notes["synced"] for _, notes in whole[0]]
    assert synced[0]
    assert {*synced[WINDOW:]} == {0.0, 1.0}  # some votes are negative, so a lost average would change them


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: selsync(-0.1), "delta = -0.1: a change of the gradient, 0 or more"),
        (lambda: selsync(float("nan")), "delta = nan"),
        (lambda: selsync(0.1, window=0), "window = 0: the average is of 1 step or more"),
        (lambda: selsync(0.1, smoothing=0), "smoothing = 0: expected a number > 0 and ≤ 1"),
        (lambda: selsync(0.1, smoothing=1.5), "smoothing = 1.5"),
        (
            lambda: selsync(0.1, gradients, optimizer_state=AverageState),
            "optimizer_state: with aggregate gradients",
        ),
    ],
)
def test_mistakes(make: Callable[[], Method], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("reduced", [True, False])
def test_the_norm_is_summed_in_more_than_the_gradients_type(dtype: torch.dtype, reduced: bool) -> None:
    """Squares of float16 overflow from 256 on, bfloat16 has 8 bits, and long float32 sums drift."""
    g = (torch.rand(1 << 20, generator=torch.Generator().manual_seed(1)) * 300).to(dtype)
    param = nn.Parameter(torch.zeros_like(g))
    param.grad = g
    bucket = SimpleNamespace(grad_shard=g, found=lambda: [param.grad])
    fixed: Any = {"topology": None, "buckets": [bucket], "optimizer_state": None, "grads_reduced": reduced}
    s = StepContext(TrainingContext(**fixed))
    expected = float(np.square(g.double().numpy()).sum())
    assert s.squared_norm().item() == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize("broken", [float("nan"), INFINITY])
def test_what_is_no_number_means_synchronize(broken: float) -> None:
    """The average does not change: the next steps are judged as if this step had not happened."""
    norms = [4.0, 1.0, 2.0, 2.5]
    plain, other = RelativeChange(WINDOW, SMOOTHING), RelativeChange(WINDOW, SMOOTHING)
    expected = [plain(torch.tensor([norm, 1.0], dtype=torch.float64)) for norm in norms]
    found = []
    for i, norm in enumerate(norms):
        if i == 2:
            change = other(torch.tensor([1.0, broken], dtype=torch.float64))
            assert change.tolist() == [LARGEST, LARGEST]
        found.append(other(torch.tensor([norm, 1.0], dtype=torch.float64)))
    torch.testing.assert_close(found, expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("delta", "synced"), [(0.0, True), (1e300, True), (INFINITY, False)])
def test_a_gradient_that_is_no_number_makes_groups_synchronize(run, delta: float, synced: bool) -> None:
    def last(world: Communicator) -> float:
        net, topology = nn.Linear(2, 1), form(world, groups=2)
        inner = optim.SGD(net.parameters(), lr=0.1)
        optimizer = hpcsgd.DistributedOptimizer(inner, net, topology, selsync(delta))
        for t in range(3):
            optimizer.zero_grad()
            net(
                torch.full((1, 2), float("nan") if t == 2 and topology.group_index == 1 else 1.0)
            ).sum().backward()
            optimizer.step()
        return optimizer.metrics["synced"]

    assert run(2, last) == [synced, synced]
