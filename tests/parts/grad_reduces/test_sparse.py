"""Sparse gradient reduction compared with algorithm 1 in plain numpy; its state, counts and errors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim

import hpcsgd
from hpcsgd.comm import Communicator
from hpcsgd.core.topology import form
from hpcsgd.errors import UserError
from hpcsgd.methods import Method, bsp, hierarchical
from hpcsgd.parts.grad_reduces import (
    ErrorFeedback,
    LrInErrorFeedback,
    MomentumCorrection,
    Plain,
    Sparse,
    per_worker,
)
from hpcsgd.parts.grad_reduces.error_feedback import Feedback
from hpcsgd.parts.sparsifiers import (
    Accumulated,
    CLTk,
    Deft,
    ExDyna,
    HardThreshold,
    MiCRO,
    Share,
    Sparsifier,
    TopK,
)
from references import (
    MakeOptimizer,
    distributed,
    model,
    one_step,
    same,
    set_vector,
    synchronize_every,
    vector,
)
from sparsifying import (
    Exdyna,
    Micro,
    Select,
    backwards_gradient,
    clt_k,
    deft,
    largest,
    of,
    put_backwards,
    sparsified,
    threshold,
    topk,
)

EVERY, STEPS, DENSITY = 3, 7, 0.2

SPARSIFIERS: dict[str, tuple[Callable[[], Sparsifier], Select]] = {
    "Top-k": (lambda: TopK(DENSITY), topk(DENSITY)),
    "CLT-k": (lambda: CLTk(DENSITY), clt_k(DENSITY)),
    "hard threshold": (lambda: HardThreshold(0.1), threshold(0.1)),
    "DEFT": (lambda: Deft(DENSITY), deft(DENSITY)),
    "DEFT, exact": (lambda: Deft(DENSITY, exact=True), deft(DENSITY, exact=True)),
    "MiCRO": (lambda: MiCRO(DENSITY), Micro(DENSITY)),
    "ExDyna": (lambda: ExDyna(DENSITY), Exdyna(DENSITY)),
    "ExDyna for slopes": (lambda: ExDyna(DENSITY, compare_neighbours=True), Exdyna(DENSITY, slopes=True)),
}
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD": lambda params: optim.SGD(params, lr=0.1),
    "momentum": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "AdamW": lambda params: optim.AdamW(params, lr=0.01),
}


def sgd(params: list[nn.Parameter]) -> optim.Optimizer:
    return optim.SGD(params, lr=0.1)


@pytest.mark.threads(unless={"P": 2, "K": 2})
@pytest.mark.parametrize(("P", "K", "optimizer"), [(1, 2, "AdamW"), (2, 2, "SGD"), (1, 4, "momentum")])
@pytest.mark.parametrize("name", SPARSIFIERS)
def test_equals_algorithm_1(run, name: str, P: int, K: int, optimizer: str) -> None:
    sparsifier, select = SPARSIFIERS[name]
    make = OPTIMIZERS[optimizer]

    def method() -> Method:
        return hierarchical(EVERY, Sparse(sparsifier()))

    ranks = run(P * K, lambda world: distributed(world, P, method(), make, STEPS))
    same(ranks, sparsified(P, K, select, make, STEPS, synchronize_every(EVERY)), K)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "options",
    [
        {"bucket_cap_mb": 1e-4},
        {"overlap_grad_reduce": False},
        {"bucket_cap_mb": 1e-4, "overlap_grad_reduce": False},
    ],
)
@pytest.mark.parametrize("name", SPARSIFIERS)
def test_buckets_and_overlap_change_nothing(run, name: str, options: dict[str, Any]) -> None:
    sparsifier, select = SPARSIFIERS[name]

    def method() -> Method:
        return bsp(Sparse(sparsifier()))

    ranks = run(2, lambda world: distributed(world, 1, method(), OPTIMIZERS["momentum"], STEPS, **options))
    same(ranks, sparsified(1, 2, select, OPTIMIZERS["momentum"], STEPS), 2)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", SPARSIFIERS)
def test_of_groups_together_all_ranks_are_workers(run, name: str) -> None:
    sparsifier, select = SPARSIFIERS[name]
    ranks = run(4, lambda world: distributed(world, 2, bsp(Sparse(sparsifier())), sgd, STEPS))
    same(ranks, sparsified(1, 4, select, sgd, STEPS), 4)


@pytest.mark.threads(unless={"K": 2})
@pytest.mark.parametrize(
    "sparsifier", [TopK(1), CLTk(1), Deft(1), Deft(1, exact=True), HardThreshold(1e-300)]
)
@pytest.mark.parametrize("K", [2, 4])
def test_everything_is_the_dense_gradient_reduction(run, sparsifier: Sparsifier, K: int) -> None:
    make = OPTIMIZERS["AdamW"]
    dense = run(K, lambda world: distributed(world, 1, bsp(), make, STEPS))
    sparse = run(K, lambda world: distributed(world, 1, bsp(Sparse(sparsifier)), make, STEPS))
    for mine, theirs in zip(dense, sparse, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", SPARSIFIERS)
def test_nothing_is_lost(run, name: str) -> None:
    """At a learning rate of 1 parameters move by what was sent; with the residuals it is all gradients."""

    def training(world: Communicator) -> tuple[Tensor, Tensor]:
        net, another = model(), model()
        grad_reduce = Sparse(SPARSIFIERS[name][0]())
        inner = optim.SGD(net.parameters(), lr=1.0)
        optimizer = hpcsgd.DistributedOptimizer(inner, net, form(world), bsp(grad_reduce))
        given, start = torch.zeros(0), vector(net)
        for t in range(STEPS):
            set_vector(another, vector(net))
            grad = torch.from_numpy(backwards_gradient(another, t, world.rank))
            given = grad if t == 0 else given + grad
            one_step(net, optimizer, form(world), t)
        residual = optimizer.state_dict()["hpcsgd"]["method"]["grad_reduce"]["per_rank_params"]["acc"]
        left = torch.cat(list(residual.values()))
        return given - left, backwards(start) - backwards(vector(net))

    def backwards(w: Tensor) -> Tensor:
        sizes = [p.numel() for p in model().parameters()]
        return torch.cat(list(reversed(w.split(sizes))))

    sent, moved = zip(*run(4, training), strict=True)
    torch.testing.assert_close(torch.stack(sent).mean(0), moved[0], rtol=0, atol=1e-12)


@pytest.mark.ranks(4)
def test_own_values_alone(run) -> None:
    """Top-k as by A. Aji and K. Heafield: values that only another worker selected are kept."""
    e = np.zeros((4, vector(model()).numel()))
    net = model()
    history = []
    for t in range(STEPS):
        acc = e + np.stack([backwards_gradient(net, t, rank) for rank in range(4)])
        sent = np.zeros_like(acc)
        for mine, given in zip(acc, sent, strict=True):
            idx = largest(mine, of(DENSITY, mine))
            given[idx] = mine[idx]
        e = acc - sent
        history.append([descend(net, 0.1 * sent.mean(0))])
    ranks = run(4, lambda world: distributed(world, 1, bsp(Sparse(TopK(DENSITY), per_worker)), sgd, STEPS))
    same(ranks, history, 4)


@pytest.mark.ranks(2)
def test_plain_indices(run) -> None:
    ranks = run(
        2, lambda world: distributed(world, 1, bsp(Sparse(TopK(DENSITY), indices=Plain())), sgd, STEPS)
    )
    same(ranks, sparsified(1, 2, topk(DENSITY), sgd, STEPS), 2)


@pytest.mark.ranks(2)
def test_the_rate_inside(run) -> None:
    """Algorithm 1 to the letter, with a changing rate: w −= mean of (e + η·g) at the joint indices."""

    def rate(t: int) -> float:
        return 0.1 / (1 + t)

    def training(world: Communicator) -> list[Tensor]:
        net = model(seed=world.rank)
        method = bsp(Sparse(TopK(DENSITY), feedback=LrInErrorFeedback()))
        topology = form(world)
        optimizer = hpcsgd.DistributedOptimizer(optim.SGD(net.parameters(), lr=0.1), net, topology, method)
        history = []
        for t in range(STEPS):
            optimizer.param_groups[0]["lr"] = rate(t)
            history.append(one_step(net, optimizer, topology, t))
        return history

    def literal() -> list[list[Tensor]]:
        net = model()
        e, history = np.zeros((2, vector(net).numel())), []
        for t in range(STEPS):
            acc = e + rate(t) * np.stack([backwards_gradient(net, t, rank) for rank in range(2)])
            idx = topk(DENSITY)(list(acc), [], t)
            history.append([descend(net, acc[:, idx].mean(0), idx)])
            acc[:, idx] = 0
            e = acc
        return history

    same(run(2, training), literal(), 2)


@pytest.mark.ranks(2)
def test_momentum_correction(run) -> None:
    """u = m·u + g; acc = e + u; both are set to zero where they were sent."""
    net, m = model(), 0.9
    u = np.zeros((2, vector(net).numel()))
    acc, history = np.zeros_like(u), []
    for t in range(STEPS):
        u = m * u + np.stack([backwards_gradient(net, t, rank) for rank in range(2)])
        acc = acc + u
        idx = topk(DENSITY)(list(acc), [], t)
        history.append([descend(net, 0.1 * acc[:, idx].mean(0), idx)])
        acc[:, idx] = u[:, idx] = 0

    def method() -> Method:
        return bsp(Sparse(TopK(DENSITY), feedback=MomentumCorrection(m)))

    same(run(2, lambda world: distributed(world, 1, method(), sgd, STEPS)), history, 2)


def descend(net: nn.Module, update: np.ndarray, idx: np.ndarray | None = None) -> Tensor:
    values = np.zeros(vector(net).numel())
    values[slice(None) if idx is None else idx] = update
    put_backwards(net, values)
    optim.SGD(net.parameters(), lr=1.0).step()
    return vector(net)


WRONG: dict[str, tuple[Callable[[], Sparse], MakeOptimizer, str]] = {
    "rate inside, momentum": (
        lambda: Sparse(TopK(DENSITY), feedback=LrInErrorFeedback()),
        OPTIMIZERS["momentum"],
        "feedback lr_in_error_feedback: the optimizer must not have momentum = 0.9",
    ),
    "rate inside, AdamW": (
        lambda: Sparse(TopK(DENSITY), feedback=LrInErrorFeedback()),
        OPTIMIZERS["AdamW"],
        "feedback lr_in_error_feedback is for SGD, not for AdamW",
    ),
    "rate inside, two rates": (
        lambda: Sparse(TopK(DENSITY), feedback=LrInErrorFeedback()),
        lambda p: optim.SGD([{"params": p[:1]}, {"params": p[1:], "lr": 0.2}], lr=0.1),
        "feedback lr_in_error_feedback: one learning rate for all, not [0.1, 0.2]",
    ),
    "rate inside, none": (
        lambda: Sparse(TopK(DENSITY), feedback=LrInErrorFeedback()),
        lambda p: optim.SGD(p, lr=0.0),
        "feedback lr_in_error_feedback: what is sent at a learning rate of 0 would be lost",
    ),
    "two momenta": (
        lambda: Sparse(TopK(DENSITY), feedback=MomentumCorrection(0.9)),
        OPTIMIZERS["momentum"],
        "feedback momentum_correction: the optimizer must not have momentum = 0.9",
    ),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", WRONG)
def test_what_would_be_wrong_is_refused(run, name: str) -> None:
    grad_reduce, make, message = WRONG[name]

    def training(world: Communicator) -> str:
        with pytest.raises(UserError) as raised:
            distributed(world, 1, bsp(grad_reduce()), make, 1)
        return str(raised.value)

    assert run(2, training) == [message] * 2


@pytest.mark.parametrize("sparsifier", [CLTk(0.1), Deft(0.1)])
def test_own_values_where_one_worker_chooses_are_refused(sparsifier: Sparsifier) -> None:
    with pytest.raises(UserError, match="one worker selects each element"):
        Sparse(sparsifier, per_worker)


@pytest.mark.ranks(1)
def test_a_group_of_one_sends_nothing(run) -> None:
    sparse = run(1, lambda world: distributed(world, 1, bsp(Sparse(TopK(0.01))), sgd, STEPS))
    plain = run(1, lambda world: distributed(world, 1, bsp(), sgd, STEPS))
    for mine, theirs in zip(sparse[0], plain[0], strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("feedback", [ErrorFeedback(), MomentumCorrection(0.5)])
def test_back_at_the_start_nothing_is_kept(run, feedback: Feedback) -> None:
    """An optimizer that has already trained loads a state from before the first step."""

    def training(world: Communicator) -> tuple[Tensor, Tensor]:
        net = model()
        method = bsp(Sparse(TopK(DENSITY), feedback=feedback))
        optimizer = hpcsgd.DistributedOptimizer(sgd(list(net.parameters())), net, form(world), method)
        begin, start = copy.deepcopy((optimizer.state_dict(), net.state_dict()))
        ends = []
        for _ in range(2):
            optimizer.load_state_dict(begin)
            net.load_state_dict(start)
            for t in range(2):
                one_step(net, optimizer, form(world), t)
            ends.append(vector(net))
        return ends[0], ends[1]

    for once, again in run(2, training):
        assert torch.equal(once, again)


@pytest.mark.ranks(2)
def test_what_is_noted_of_a_step(run) -> None:
    def training(world: Communicator) -> list[dict[str, float]]:
        net = model(seed=world.rank)
        grad_reduce = Sparse(TopK(DENSITY))
        topology = form(world)
        optimizer = hpcsgd.DistributedOptimizer(sgd(list(net.parameters())), net, topology, bsp(grad_reduce))
        noted = []
        for t in range(STEPS):
            one_step(net, optimizer, topology, t)
            state = optimizer.state_dict()["hpcsgd"]["method"]["grad_reduce"]["per_rank_params"]["acc"]
            left = torch.cat(list(state.values()))
            noted.append({**optimizer.metrics, "left": float(left.norm())})
        return noted

    ranks = run(2, training)
    M, k = vector(model()).numel(), of(DENSITY, np.zeros(vector(model()).numel()))
    for t in range(STEPS):
        notes = [rank[t] for rank in ranks]
        error = sum(note["left"] for note in notes) / 2
        for note in notes:
            assert note["error"] == pytest.approx(error, rel=1e-9)
            assert k <= round(note["density"] * M) <= 2 * k
            assert note["growth"] == pytest.approx(note["density"] * M / k)
            parts = ("share", "select", "encode", "combine", "apply")
            assert {f"{part}_seconds" for part in parts} < set(note)
    assert max(note["growth"] for note in ranks[0]) > 1


class Noting:
    """A MiCRO that records the values it adapts to."""

    disjoint = True

    def __init__(self) -> None:
        self.inner, self.noted = MiCRO(DENSITY), list[tuple[list[int], int, int]]()

    def cut(self, layers: Tensor, n: int) -> Tensor:
        return self.inner.cut(layers, n)

    def share(self, x: Accumulated, t: int, workers: Communicator) -> Share:
        return self.inner.share(x, t, workers)

    def select(self, x: Accumulated, share: Share) -> Tensor:
        return self.inner.select(x, share)

    def adapt(self, counts: Sequence[int], t: int, M: int) -> None:
        self.noted.append((list(counts), t, M))
        self.inner.adapt(counts, t, M)


@pytest.mark.ranks(2)
def test_how_many_each_worker_selected_is_noted(run) -> None:
    def training(world: Communicator) -> list[tuple[float, float, tuple[list[int], int, int]]]:
        net, topology, sparsifier = model(seed=world.rank), form(world), Noting()
        method = bsp(Sparse(sparsifier))
        optimizer = hpcsgd.DistributedOptimizer(sgd(list(net.parameters())), net, topology, method)
        found = []
        for t in range(STEPS):
            one_step(net, optimizer, topology, t)
            assert "growth" not in optimizer.metrics
            found.append((*(optimizer.metrics[x] for x in ("density", "imbalance")), sparsifier.noted[-1]))
        return found

    first, second = run(2, training)
    assert first == second
    for step, (density, imbalance, (counts, t, M)) in enumerate(first):
        assert (t, M, len(counts)) == (step, vector(model()).numel(), 2)
        assert density * M == pytest.approx(sum(counts))
        assert imbalance == max(counts) * 2 / sum(counts)
    assert max(imbalance for _, imbalance, _ in first) > 1


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", ["CLT-k", "DEFT, exact"])
def test_density_is_as_set(run, name: str) -> None:
    def training(world: Communicator) -> list[float]:
        net = model(seed=world.rank)
        topology = form(world)
        method = bsp(Sparse(SPARSIFIERS[name][0]()))
        optimizer = hpcsgd.DistributedOptimizer(sgd(list(net.parameters())), net, topology, method)
        densities = []
        for t in range(STEPS):
            one_step(net, optimizer, topology, t)
            densities.append(optimizer.metrics["density"])
            assert "growth" not in optimizer.metrics
        return densities

    M = vector(model()).numel()
    assert run(4, training) == [[round(DENSITY * M) / M] * STEPS] * 4


@pytest.mark.ranks(2)
def test_a_float32_model_and_one_of_two_types(run) -> None:
    """The native kernels handle float32; one float64 parameter makes all of acc float64."""

    def training(world: Communicator, wide: bool) -> list[float]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 5))
        if wide:
            net[1].double()
        topology, losses = form(world), []
        inner = optim.SGD(net.parameters(), lr=0.05)
        optimizer = hpcsgd.DistributedOptimizer(inner, net, topology, bsp(Sparse(Deft(0.1, exact=True))))
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(world.rank))
        for _ in range(20):
            optimizer.zero_grad()
            y = net[1](net[0](x).to(net[1].weight.dtype))
            value = (y - 1).square().mean()
            value.backward()
            optimizer.step()
            losses.append(value.item())
            assert optimizer.metrics["density"] == pytest.approx(0.1, abs=1e-3)
        return losses

    for wide in (False, True):
        for losses in run(2, training, wide):
            assert losses[-1] < 0.5 * losses[0]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("feedback", [LrInErrorFeedback(), MomentumCorrection(0.75)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_nothing_is_rounded_to_16_bits(run, feedback: Feedback, dtype: torch.dtype) -> None:
    """acc is float32. What is added to it has more bits than a gradient, and may be too small for float16."""
    last = torch.finfo(dtype).eps
    gradients, rate = [torch.full((64,), (1 + last) * 2.0**-i, dtype=dtype) for i in (15, 16)], 3 * 2.0**-14

    def training(world: Communicator) -> Tensor:
        net = nn.Linear(64, 1, bias=False, dtype=dtype)
        inner, method = (
            optim.SGD(net.parameters(), lr=rate),
            bsp(Sparse(HardThreshold(1e9), feedback=feedback)),
        )
        optimizer = hpcsgd.DistributedOptimizer(inner, net, form(world), method)
        for g in gradients:
            optimizer.zero_grad()
            net(g).sum().backward()
            optimizer.step()
        return method.state_dict()["grad_reduce"].per_rank_params["acc"]["weight"]

    first, second = (float(g[0]) for g in gradients)
    u = 0.75 * first + second
    expected = rate * (first + second) if isinstance(feedback, LrInErrorFeedback) else first + u
    for acc in run(2, training):
        assert torch.equal(acc, torch.full((64,), expected))


@pytest.mark.ranks(2)
@pytest.mark.threads
def test_another_feedback_after_a_restart(run, caplog: pytest.LogCaptureFixture) -> None:
    """What was not sent goes on, and the momentum begins at 0."""

    def training(world: Communicator) -> bool:
        def new(feedback: Feedback) -> tuple[nn.Module, hpcsgd.DistributedOptimizer]:
            net = model()
            method = bsp(Sparse(HardThreshold(1e9), feedback=feedback))
            inner = sgd(list(net.parameters()))
            return net, hpcsgd.DistributedOptimizer(inner, net, form(world), method)

        first, before = new(ErrorFeedback())
        one_step(first, before, form(world), 0)
        second, after = new(MomentumCorrection(0.5))
        after.load_state_dict(before.state_dict())
        second.load_state_dict(first.state_dict())
        one_step(second, after, form(world), 1)
        one_step(first, before, form(world), 1)
        ours, theirs = (x.method.state_dict()["grad_reduce"].per_rank_params["acc"] for x in (after, before))
        return all(torch.equal(ours[name], theirs[name]) for name in ours)

    assert run(2, training) == [True, True]
    assert len([x for x in caplog.messages if "was written with another feedback" in x]) == 1
