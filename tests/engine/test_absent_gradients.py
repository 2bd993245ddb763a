"""Missing gradients are handled as in plain torch and DistributedDataParallel, for every P × K.

A frozen parameter keeps its bits. A parameter for which no rank has a gradient is skipped. If only some ranks
have a gradient, it counts as zero on the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import hpcsgd
from hpcsgd import DistributedOptimizer, Method, UserError, bsp, hierarchical, selsync
from hpcsgd.comm import Communicator, threads
from hpcsgd.core.step import GradReduce
from hpcsgd.core.topology import form
from hpcsgd.engine.presence import Gradients, Presence, united
from hpcsgd.methods.selsync import gradients
from hpcsgd.parts.grad_reduces import AllReduce
from methods.table import EXCEPTIONS, REFERENCES
from references import batch, loss, vector
from references import model as make_model

STEPS = 8
MAKE: dict[str, Callable[[Any], optim.Optimizer]] = {
    "adamw": lambda params: optim.AdamW(params, lr=0.01, weight_decay=0.1),
    "momentum": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
    "unknown": lambda params: type("Own", (optim.SGD,), {})(params, lr=0.1, momentum=0.9, weight_decay=0.1),
}
SHAPES = [(2, 3), (1, 1), (1, 2), (2, 1), (3, 1), (2, 2)]
GRAD_REDUCES = {"shards": bsp, "whole": lambda: bsp(AllReduce())}


class Experts(nn.Module):
    """A model in which the step and the rank decide which of two layers are used. A third is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = make_model(seed=0), nn.Linear(3, 3).double()
        self.experts = nn.ModuleList([nn.Linear(3, 3).double() for _ in range(3)])
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in [*self.head.parameters(), *self.experts.parameters()]:
                p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype, device="cpu"))

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        x = self.trunk(x)
        for number in used:
            x = x + self.experts[number](x)
        return self.head(x)


def used(t: int, rank: int) -> list[int]:
    """Return the layers in use. By turns all ranks use some layers, only some ranks do, or none does."""
    return [[0, 1], [0] if rank else [], [1], []][t % 4]


def value(net: Experts, t: int, rank: int) -> Tensor:
    x, y = batch(t, rank)
    return nn.functional.cross_entropy(net(x, used(t, rank)), y)


def experts_are_as_in_one_process(
    run: Callable[..., Any],
    P: int,
    K: int,
    kind: str,
    method: Callable[[], Method],
    early: bool = False,
    **options: Any,
) -> None:
    net = Experts()
    plain = MAKE[kind](net.parameters())
    for t in range(STEPS):
        plain.zero_grad()
        torch.stack([value(net, t, rank) for rank in range(P * K)]).mean().backward()
        plain.step()
    expected = vector(net)

    def train(world: Communicator) -> tuple[Tensor, list[bool]]:
        net = Experts()
        inner = MAKE[kind](net.parameters())
        optimizer = DistributedOptimizer(inner, net, form(world, P), method(), bucket_cap_mb=1e-4, **options)
        for t in range(STEPS):
            optimizer.zero_grad()
            value(net, t, world.rank).backward()
            if early:
                optimizer.synchronize()
            optimizer.step()
        return vector(net), [p.grad is None for p in net.experts.parameters()]

    for w, without in run(P * K, train):
        torch.testing.assert_close(w, expected, rtol=0, atol=1e-11)
        # A rank sees the result of the groups' reduction only for its own shard.
        assert early or without == [p.grad is None for p in net.experts.parameters()]


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("grad_reduce", GRAD_REDUCES)
@pytest.mark.parametrize(("P", "K"), SHAPES)
def test_clipping_to_a_norm_of_nan_leaves_unused_parameters_as_they_are(
    run, P: int, K: int, grad_reduce: str, kind: str
) -> None:
    def train(world: Communicator) -> None:
        net = Experts()
        inner, method = MAKE[kind](net.parameters()), GRAD_REDUCES[grad_reduce]()
        optimizer = DistributedOptimizer(inner, net, form(world, P), method, bucket_cap_mb=1e-4)
        unused = vector(net.experts[1])
        (value(net, 3, world.rank) * torch.nan).backward()
        assert optimizer.clip_grad_norm_(1.0).isnan()
        optimizer.step()
        assert vector(net.trunk).isnan().all()
        assert torch.equal(vector(net.experts[1]), unused)

    run(P * K, train)


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("grad_reduce", GRAD_REDUCES)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("P", "K"), SHAPES)
def test_experts_that_some_ranks_or_no_rank_uses(
    run, P: int, K: int, grad_reduce: str, overlap: bool, kind: str
) -> None:
    experts_are_as_in_one_process(run, P, K, kind, GRAD_REDUCES[grad_reduce], overlap_grad_reduce=overlap)


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.ranks(2)
def test_experts_that_some_groups_or_no_group_uses(run, kind: str) -> None:
    """Groups average their gradients after each has averaged those of its own ranks."""
    experts_are_as_in_one_process(run, 2, 1, kind, lambda: selsync(0.0, aggregate=gradients))


@pytest.mark.parametrize("grad_reduce", [hpcsgd.Dense(), AllReduce()], ids=["shards", "whole"])
@pytest.mark.ranks(4)
def test_experts_that_a_whole_group_does_not_use(
    run, monkeypatch: pytest.MonkeyPatch, grad_reduce: GradReduce
) -> None:
    """The gradients of one group are missing in its own reduction and at the beginning of the update."""
    monkeypatch.setattr(f"{__name__}.used", lambda t, rank: [t % 2] if rank < 2 else [])
    method = lambda: selsync(0.0, aggregate=gradients, grad_reduce=grad_reduce)  # noqa: E731
    experts_are_as_in_one_process(run, 2, 2, "adamw", method, early=True)


TABLE = {**REFERENCES, **EXCEPTIONS}


@pytest.mark.slow
@pytest.mark.parametrize("label", TABLE)
@pytest.mark.ranks(6)
def test_a_frozen_layer_stays_and_thaws(run, label: str) -> None:
    """A frozen layer keeps its bits with every method. The groups' models differ when it is frozen."""
    case = TABLE[label]

    def train(world: Communicator) -> tuple[bool, bool, Tensor, Tensor, Tensor]:
        net: Any = make_model(dtype=torch.float64)
        inner = optim.SGD(net.parameters(), lr=0.1, momentum=0.0 if "sasgd" in label else 0.9)
        optimizer = DistributedOptimizer(inner, net, case.form(world, 2), case.new())

        def steps(first: int, last: int) -> None:
            for t in range(first, last):
                optimizer.zero_grad()
                value = loss(net, *batch(t, world.rank))
                value.backward()
                optimizer.step(loss=value)

        steps(0, 3)
        net[0].requires_grad_(False)
        before = vector(net[0])
        steps(3, 9)
        stayed = torch.equal(before, vector(net[0]))
        with optimizer.averaged_model():
            averaged = vector(net[0])
        net[0].requires_grad_(True)
        steps(9, 12)
        optimizer.state_dict()
        return stayed, torch.equal(before, vector(net[0])), vector(net), before, averaged

    ranks = run(6, train)
    mean = torch.stack([before for *_, before, _ in ranks]).mean(0)
    for stayed, still, w, before, averaged in ranks:
        assert stayed
        assert not still
        assert w.isfinite().all()
        own = case.method == "ensemble_sync"  # evaluates each group's own model
        torch.testing.assert_close(averaged, before if own else mean, rtol=0, atol=1e-12)


@pytest.mark.parametrize("make", [hierarchical, hpcsgd.diloco])
@pytest.mark.ranks(2)
def test_a_frozen_layer_stays_in_groups_of_one_rank(run, make: Callable[[int], Method]) -> None:
    def train(world: Communicator) -> bool:
        net: Any = make_model()
        inner = optim.SGD(net.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, net, form(world, 2), make(2))
        before = []
        for t in range(4):
            optimizer.zero_grad()
            net[0].requires_grad_(t < 1)
            before.append(vector(net[0]))
            loss(net, *batch(t, world.rank)).backward()
            optimizer.step()
        return torch.equal(before[1], vector(net[0]))

    assert run(2, train) == [True, True]


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize(("P", "K"), SHAPES)
def test_a_layer_frozen_for_a_while_is_as_in_one_process(run, P: int, K: int, kind: str) -> None:
    def steps(net: Any, optimizer: optim.Optimizer, backward: Callable[[int], None]) -> None:
        for t in range(STEPS):
            net[0].requires_grad_(not 2 <= t < 5)
            optimizer.zero_grad()
            backward(t)
            optimizer.step()

    net = make_model()
    steps(
        net,
        MAKE[kind](net.parameters()),
        lambda t: torch.stack([loss(net, *batch(t, r)) for r in range(P * K)]).mean().backward(),
    )

    def train(world: Communicator) -> Tensor:
        own = make_model()
        optimizer = DistributedOptimizer(MAKE[kind](own.parameters()), own, form(world, P), bsp())
        steps(own, optimizer, lambda t: loss(own, *batch(t, world.rank)).backward())
        return vector(own)

    for w in run(P * K, train):
        torch.testing.assert_close(w, vector(net), rtol=0, atol=1e-11)


def frozen(net: Any) -> None:
    net[0].requires_grad_(False)


def dropped(net: Any) -> None:
    net[0].weight.grad = None


@pytest.mark.parametrize(
    ("change", "early", "line"),
    [
        (frozen, True, r"parameter 0.\w+ is frozen \(requires_grad = False\) on rank 1 and not on rank 0"),
        (
            dropped,
            False,
            r"the gradient of 0.weight was set to None after backward\(\) on rank 1, and not on rank 0",
        ),
    ],
    ids=["frozen", "dropped"],
)
@pytest.mark.parametrize("clipped", [False, True])
def test_on_one_rank_alone_it_is_refused(
    change: Callable[[Any], None], early: bool, line: str, clipped: bool
) -> None:
    def body(world: Communicator) -> None:
        net = make_model()
        optimizer = DistributedOptimizer(MAKE["adamw"](net.parameters()), net, form(world), bsp())
        if early and world.rank:
            change(net)
        loss(net, *batch(0, world.rank)).backward()
        if clipped:
            optimizer.clip_grad_norm_(1.0)
        if not early and world.rank:
            change(net)
        optimizer.step()

    with pytest.raises(UserError, match=line):
        threads.run(2, body, timeout=20)


def test_frozen_on_one_rank_alone_after_clipping_is_refused() -> None:
    def body(world: Communicator) -> None:
        net = make_model()
        optimizer = DistributedOptimizer(MAKE["adamw"](net.parameters()), net, form(world), bsp())
        loss(net, *batch(0, world.rank)).backward()
        optimizer.clip_grad_norm_(1.0)
        if world.rank:
            frozen(net)
        optimizer.step()

    with pytest.raises(UserError, match=r"parameter 0.\w+ is frozen .* on rank 1 and not on rank 0"):
        threads.run(2, body, timeout=20)


def test_frozen_on_one_rank_and_unused_on_the_other_is_refused_too() -> None:
    """No rank has a gradient, but the reasons differ between ranks."""

    def body(world: Communicator) -> None:
        net = Experts()
        optimizer = DistributedOptimizer(MAKE["adamw"](net.parameters()), net, form(world), bsp())
        net.experts[2].requires_grad_(world.rank == 0)
        value(net, 0, world.rank).backward()
        optimizer.step()

    with pytest.raises(UserError, match=r"experts.2.\w+ is frozen .* on rank 1 and not on rank 0"):
        threads.run(2, body, timeout=20)


@pytest.mark.parametrize(
    ("first", "second", "together"),
    [
        (Presence.MISSING, Presence.DROPPED, {0: Presence.DROPPED}),
        (Presence.FROZEN, Presence.FROZEN, {0: Presence.FROZEN}),
        (Presence.THERE, Presence.MISSING, {}),  # even if the gradient is zero
    ],
)
def test_what_two_ranks_have_together(
    first: Presence, second: Presence, together: dict[int, Presence]
) -> None:
    for ranks in ([bytes([first]), bytes([second])], [bytes([second]), bytes([first])]):
        assert united(ranks, ["w"], lambda rank: rank) == Gradients(together)


@pytest.mark.ranks(2)
def test_a_frozen_parameter_has_no_gradient_after_the_step(run) -> None:
    def train(world: Communicator) -> list[bool]:
        net: Any = make_model()
        optimizer = DistributedOptimizer(MAKE["adamw"](net.parameters()), net, form(world), bsp())
        loss(net, *batch(0, world.rank)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        net[0].requires_grad_(False)
        loss(net, *batch(1, world.rank)).backward()
        optimizer.step()
        return [p.grad is None for p in net.parameters()]

    assert run(2, train) == [[True, True, False, False, False, False]] * 2


@pytest.mark.ranks(2)
def test_a_gradient_may_be_replaced_before_it_is_sent(run) -> None:
    def train(world: Communicator) -> bool:
        net: Any = make_model()
        inner = optim.SGD(net.parameters(), lr=1.0)
        optimizer = DistributedOptimizer(inner, net, form(world), bsp(), overlap_grad_reduce=False)
        before = net[0].weight.detach().clone()
        loss(net, *batch(0, world.rank)).backward()
        net[0].weight.grad = torch.full_like(net[0].weight, world.rank)
        optimizer.step()
        return torch.equal(before - 0.5, net[0].weight)

    assert run(2, train) == [True, True]


def test_a_gradient_that_is_replaced_unseen_is_refused() -> None:
    def body(world: Communicator) -> None:
        net: Any = make_model()
        optimizer = DistributedOptimizer(MAKE["adamw"](net.parameters()), net, form(world), bsp())
        loss(net, *batch(0, world.rank)).backward()
        net[0].weight.grad = torch.zeros_like(net[0].weight)
        optimizer.step()

    with pytest.raises(
        UserError, match=r"the gradient of 0.weight was replaced .* call optimizer.synchronize\(\)"
    ):
        threads.run(2, body, timeout=20)


@pytest.mark.ranks(2)
def test_what_a_gradient_reduction_has_kept_is_not_lost_with_the_gradient(run) -> None:
    """Error feedback sends the rest of the gradient of a layer that is not used any more."""

    def train(world: Communicator) -> list[float]:
        net: Any = make_model()
        grad_reduce = hpcsgd.Sparse(hpcsgd.TopK(density=0.1))
        method = hierarchical(100, grad_reduce=grad_reduce)
        optimizer = DistributedOptimizer(optim.SGD(net.parameters(), lr=0.1), net, form(world), method)
        moved = []
        for t in range(60):
            optimizer.zero_grad()
            x, y = batch(t, world.rank)
            hidden = net[0](x)
            nn.functional.cross_entropy(net[1:](hidden.detach() if t else hidden), y).backward()
            before = vector(net[0])
            optimizer.step()
            moved.append((vector(net[0]) - before).abs().sum().item())
        return moved

    for moved in run(2, train):
        assert any(moved[1:])


@pytest.mark.ranks(2)
def test_where_a_gradient_reduction_has_a_memory_a_missing_gradient_is_zero(run) -> None:
    """Weights decay if all ranks lack the gradient, whether error feedback sends anything or not."""

    def train(world: Communicator) -> Tensor:
        net: Any = make_model()
        inner = optim.SGD(net.parameters(), lr=0.1, weight_decay=1.0)
        method = bsp(hpcsgd.Sparse(hpcsgd.TopK(density=1.0)))
        optimizer = DistributedOptimizer(inner, net, form(world), method)
        x, y = batch(0, world.rank)
        nn.functional.cross_entropy(net[1:](net[0](x).detach()), y).backward()
        optimizer.step()
        return vector(net[0])

    net: Any = make_model()
    for w in run(2, train):
        torch.testing.assert_close(w, 0.9 * vector(net[0]), rtol=0, atol=1e-12)
