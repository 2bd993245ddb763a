"""Optimizers with closures and methods other than `step()` work as in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from hpcsgd import DistributedOptimizer, adacomm, bsp, hierarchical
from hpcsgd.comm import Communicator
from hpcsgd.core.topology import Topology, form
from hpcsgd.errors import UserError
from hpcsgd.parts.grad_reduces import Sparse
from hpcsgd.parts.sparsifiers import TopK
from references import batch, loss, model, vector
from special_optimizers import LooksAhead, Nudging, Polyak, Sam, ScheduleFree

STEPS = 4
SHAPES = [(1, 1), (1, 2), (2, 1), (2, 3)]
Make = Callable[[Any], optim.Optimizer]


def mean_loss(net: nn.Module, t: int, ranks: range) -> Tensor:
    losses = [loss(net, *batch(t, rank)) for rank in ranks]
    return torch.stack(losses).mean()


def step(optimizer: Any, compute: Callable[[], Tensor], way: str) -> Any:
    """Make one step with a closure, which may drop gradients, or which follows a backward pass."""

    def closure() -> Tensor:
        if way == "dropping gradients":
            optimizer.zero_grad()
        value = compute()
        value.backward()
        return value

    if way == "after a backward pass":
        compute().backward()
    returned = optimizer.step(closure)
    if way != "dropping gradients":
        optimizer.zero_grad()
    return returned


WAYS = ["after a backward pass", "dropping gradients", "alone"]


def by_ranks(
    world: Communicator, P: int, make: Make, way: str, method: Callable[[], Any] = bsp, **options: Any
) -> Tensor:
    topology, net = form(world, P), model(world.rank)
    optimizer = DistributedOptimizer(make(net.parameters()), net, topology, method(), **options)
    for t in range(STEPS):
        step(optimizer, lambda t=t: loss(net, *batch(t, topology.rank)), way)
    return vector(net)


def by_one(n: int, make: Make, way: str) -> Tensor:
    net = model()
    optimizer = make(net.parameters())
    for t in range(STEPS):
        step(optimizer, lambda t=t: mean_loss(net, t, range(n)), way)
    return vector(net)


def require_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("P", "K"), SHAPES)
def test_an_optimizer_may_evaluate_again_at_other_weights(run, P: int, K: int, overlap: bool) -> None:
    expected = by_one(P * K, Sam, WAYS[0])
    for found in run(P * K, by_ranks_overlapping(overlap), P, Sam, WAYS[0]):
        require_close(found, expected)


def by_ranks_overlapping(overlap: bool) -> Callable[..., Tensor]:
    return lambda *args: by_ranks(*args, overlap_grad_reduce=overlap)


@pytest.mark.parametrize("way", WAYS[1:])
@pytest.mark.parametrize(("P", "K"), SHAPES)
def test_where_it_begins_without_gradients(run, P: int, K: int, way: str) -> None:
    expected = by_one(P * K, LooksAhead, way)
    for found in run(P * K, by_ranks, P, LooksAhead, way):
        require_close(found, expected)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_pieces_are_whole_parameters_while_a_closure_runs(run, n: int, overlap: bool) -> None:
    expected = by_one(n, LooksAhead, "alone")

    def cut(world: Communicator) -> Tensor:
        return by_ranks(world, 1, LooksAhead, "alone", elementwise=True, overlap_grad_reduce=overlap)

    for found in run(n, cut):
        require_close(found, expected)


@pytest.mark.ranks(2)
def test_ranks_whose_pieces_have_not_moved_evaluate_again_too(run) -> None:
    def step_of(net: nn.Module, optimizer: Any, ranks: range) -> Tensor:
        step(optimizer, lambda: mean_loss(net, 0, ranks), "alone")
        return vector(net)

    def zero_but_for_the_first() -> nn.Module:
        net = model()
        with torch.no_grad():
            for param in list(net.parameters())[1:]:
                param.zero_()  # 1.5 times zero is the same
        return net

    def cut(world: Communicator) -> Tensor:
        net = zero_but_for_the_first()
        inner = LooksAhead(net.parameters())
        optimizer = DistributedOptimizer(inner, net, form(world, 1), bsp(), elementwise=True)
        return step_of(net, optimizer, range(world.rank, world.rank + 1))

    plain = zero_but_for_the_first()
    expected = step_of(plain, LooksAhead(plain.parameters()), range(2))
    for found in run(2, cut):
        require_close(found, expected)


@pytest.mark.parametrize("elementwise", [None, True])
@pytest.mark.parametrize("n", [1, 2])
def test_masters_are_rounded_while_a_closure_runs(run, n: int, elementwise: bool | None) -> None:
    narrow = model(dtype=torch.float32)
    masters = [param.detach().double() for param in narrow.parameters()]

    def batches(t: int, ranks: range, net: nn.Module) -> Tensor:
        return torch.stack([loss(net, *batch(t, r, dtype=torch.float32)) for r in ranks]).mean()

    for t in range(STEPS):
        for param, m in zip(narrow.parameters(), masters, strict=True):
            param.grad, param.data = None, (1.5 * m).float()
        batches(t, range(n), narrow).backward()
        for param, m in zip(narrow.parameters(), masters, strict=True):
            assert param.grad is not None
            m.sub_(0.1 * param.grad.double())

    def of_rank(world: Communicator) -> Tensor:
        net, own = model(dtype=torch.float32), range(world.rank, world.rank + 1)
        inner, topology = LooksAhead(net.parameters()), form(world, 1)
        optimizer = DistributedOptimizer(
            inner, net, topology, bsp(), master_dtype=torch.float64, elementwise=elementwise
        )
        for t in range(STEPS):
            step(optimizer, lambda t=t: batches(t, own, net), "alone")
        return vector(net)

    for found in run(n, of_rank):
        expected = torch.cat([m.reshape(-1) for m in masters]).float()
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.ranks(2)
def test_methods_that_go_by_the_loss_know_it_before_the_update(run) -> None:
    """The loss is known before the update, also if old gradients are still there and none are averaged."""
    for found in run(
        2, by_ranks, 2, Polyak, "dropping gradients", lambda: adacomm(initial_sync_every=1, adapt_every=2)
    ):
        assert found.isfinite().all()


@pytest.mark.parametrize("n", [1, 2])
def test_a_loss_that_an_optimizer_goes_by_is_the_mean(run, n: int) -> None:
    expected = by_one(n, Polyak, "dropping gradients")
    for found in run(n, by_ranks, 1, Polyak, "dropping gradients"):
        require_close(found, expected)


@pytest.mark.ranks(2)
def test_what_the_optimizer_returns_is_returned(run) -> None:
    def returned(world: Communicator) -> tuple[Tensor, Tensor]:
        topology, net = form(world, 1), model()
        optimizer = DistributedOptimizer(Polyak(net.parameters()), net, topology, bsp())
        expected = mean_loss(net, 0, range(2)).detach()
        return step(optimizer, lambda: loss(net, *batch(0, topology.rank)), WAYS[1]), expected

    for found, expected in run(2, returned):
        torch.testing.assert_close(found, expected)


@pytest.mark.ranks(2)
def test_a_closure_is_evaluated_once_where_nothing_has_moved(run) -> None:
    def evaluations(world: Communicator) -> int:
        topology, net = form(world, 1), model()
        optimizer = DistributedOptimizer(Polyak(net.parameters()), net, topology, bsp())
        seen: list[int] = []

        def compute(t: int) -> Tensor:
            seen.append(t)
            return loss(net, *batch(t, topology.rank))

        for t in range(STEPS):
            step(optimizer, lambda t=t: compute(t), WAYS[1])
        return len(seen)

    assert run(2, evaluations) == [STEPS, STEPS]


@pytest.mark.parametrize(("P", "K"), [(2, 1), (2, 2)])
def test_groups_synchronize(run, P: int, K: int) -> None:
    nets = [model() for _ in range(P)]
    optimizers = [Sam(net.parameters()) for net in nets]
    for t in range(STEPS):
        for g, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            ranks = range(g * K, (g + 1) * K)
            step(optimizer, lambda net=net, t=t, ranks=ranks: mean_loss(net, t, ranks), WAYS[0])
        if t % 2:
            with torch.no_grad():
                for params in zip(*(net.parameters() for net in nets), strict=True):
                    mean = torch.stack(params).mean(0)
                    for param in params:
                        param.copy_(mean)
    for found in run(P * K, by_ranks, P, Sam, WAYS[0], lambda: hierarchical(2)):
        require_close(found, vector(nets[0]))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.ranks(2)
def test_a_gradient_reduction_with_a_memory_sees_one_gradient_a_step(run, way: str) -> None:
    with pytest.raises(UserError, match="several times in a step"):
        run(2, by_ranks, 1, LooksAhead, way, lambda: bsp(grad_reduce=Sparse(TopK(0.5))))


@pytest.mark.ranks(2)
def test_nothing_has_moved_where_that_is_known_before(run) -> None:
    def refused(world: Communicator) -> Tensor:
        topology, net = form(world, 1), model()
        optimizer = DistributedOptimizer(
            LooksAhead(net.parameters()), net, topology, bsp(grad_reduce=Sparse(TopK(0.5)))
        )
        with pytest.raises(UserError, match="several times in a step"):
            step(optimizer, lambda: loss(net, *batch(0, topology.rank)), WAYS[0])
        return vector(net)

    for found in run(2, refused):
        assert torch.equal(found, vector(model()))


@pytest.mark.ranks(2)
def test_a_closure_has_to_return_a_loss(run) -> None:
    def several(world: Communicator) -> None:
        topology, net = form(world, 1), model()
        optimizer = DistributedOptimizer(Polyak(net.parameters()), net, topology, bsp())
        optimizer.step(lambda: {"loss": loss(net, *batch(0, topology.rank))})

    with pytest.raises(UserError, match="returned a dict"):
        run(2, several)


def schedule_free(net: nn.Module, around: Callable[[optim.Optimizer], Any], ranks: range) -> list[Tensor]:
    """Return the weights for evaluation after every second step, and finally those for training."""
    inner = ScheduleFree(net.parameters())
    optimizer = around(inner)
    found = []
    for t in range(STEPS):
        optimizer.train()
        optimizer.zero_grad()
        mean_loss(net, t, ranks).backward()
        optimizer.step()
        if t % 2:
            (inner if t == 1 else optimizer).eval()
            found.append(vector(net))
    optimizer.train()
    return [*found, vector(net)]


@pytest.mark.parametrize("options", [{}, {"elementwise": True}], ids=["whole", "cut"])
@pytest.mark.parametrize(("P", "K"), [(1, 1), (1, 2), (2, 2)])
def test_weights_for_an_evaluation_are_those_of_one_process(
    run, P: int, K: int, options: dict[str, Any]
) -> None:
    """The optimizer's own method sets the weights, called on the wrapper or on the wrapped optimizer."""
    expected = schedule_free(model(), lambda inner: inner, range(P * K))

    def of_rank(world: Communicator) -> list[Tensor]:
        topology, net = form(world, P), model(world.rank)
        return schedule_free(
            net,
            lambda inner: DistributedOptimizer(inner, net, topology, bsp(), **options),
            range(topology.rank, topology.rank + 1),
        )

    for found in run(P * K, of_rank):
        for ours, theirs in zip(found, expected, strict=True):
            require_close(ours, theirs)


def sam_of(world: Communicator, **options: Any) -> tuple[Topology, nn.Module, Sam, DistributedOptimizer]:
    topology, net = form(world, 1), model()
    inner = Sam(net.parameters())
    return topology, net, inner, DistributedOptimizer(inner, net, topology, bsp(), **options)


@pytest.mark.parametrize("n", [1, 2])
def test_other_methods_find_averaged_gradients(run, n: int) -> None:
    net = model()
    inner = Sam(net.parameters())
    mean_loss(net, 0, range(n)).backward()
    inner.first_step()

    def first_step(world: Communicator) -> Tensor:
        topology, net, _, optimizer = sam_of(world)
        loss(net, *batch(0, topology.rank)).backward()
        optimizer.first_step()
        return vector(net)

    for found in run(n, first_step):
        require_close(found, vector(net))


class Halving(optim.SGD):
    def halve(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.mul_(0.5)


@pytest.mark.parametrize("n", [1, 2])
def test_what_they_make_of_pieces_of_gradients_is_read_whole(run, n: int) -> None:
    def norms(net: nn.Module) -> Tensor:
        return torch.stack([p.grad.norm() for p in net.parameters() if p.grad is not None])

    def halved(world: Communicator) -> tuple[Tensor, Tensor]:
        net = model()
        inner = Halving(net.parameters(), lr=0.1)
        optimizer: Any = DistributedOptimizer(inner, net, form(world, 1), bsp(), elementwise=True)
        loss(net, *batch(0, world.rank)).backward()
        before = norms(net)
        optimizer.halve()
        return before, norms(net)

    for before, after in run(n, halved):
        torch.testing.assert_close(after, before / 2)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("n", [1, 2])
def test_so_do_those_that_see_pieces(run, n: int, overlap: bool) -> None:
    plain = model()
    inner = Nudging(plain.parameters())
    mean_loss(plain, 0, range(n)).backward()
    inner.nudge(0.5)
    inner.step()

    def nudged(world: Communicator) -> Tensor:
        topology, net = form(world, 1), model()
        optimizer: Any = DistributedOptimizer(
            Nudging(net.parameters()), net, topology, bsp(), elementwise=True, overlap_grad_reduce=overlap
        )
        loss(net, *batch(0, topology.rank)).backward()
        optimizer.nudge(by=0.5)
        optimizer.step()
        return vector(net)

    for found in run(n, nudged):
        require_close(found, vector(plain))


@pytest.mark.parametrize("called_on", ["ours", "theirs"])
@pytest.mark.parametrize("n", [1, 2])
def test_an_update_by_another_method_is_refused(run, n: int, called_on: str) -> None:
    def two_steps(world: Communicator) -> None:
        topology, net, inner, optimizer = sam_of(world)
        called: Any = optimizer if called_on == "ours" else inner
        loss(net, *batch(0, topology.rank)).backward()
        called.first_step(zero_grad=True)
        loss(net, *batch(0, topology.rank)).backward()
        called.second_step(zero_grad=True)

    with pytest.raises(
        UserError, match=r"second_step\(\) of Sam calls step\(\) of an optimizer inside.*closure"
    ):
        run(n, two_steps)


@pytest.mark.ranks(1)
def test_an_optimizer_inside_is_not_to_update_either(run) -> None:
    def inside(world: Communicator) -> None:
        _, _, inner, _ = sam_of(world)
        inner.base_optimizer.step()

    with pytest.raises(UserError, match="call step"):
        run(1, inside)


@pytest.mark.ranks(2)
def test_ranks_are_in_the_same_method(run) -> None:
    def one_alone(world: Communicator) -> None:
        topology, net = form(world, 1), model()
        optimizer: Any = DistributedOptimizer(ScheduleFree(net.parameters()), net, topology, bsp())
        (optimizer.eval if topology.rank else optimizer.train)()

    with pytest.raises(UserError, match=r"rank 0 is in train\(\) .* rank 1 is in eval\(\)"):
        run(2, one_alone)


@pytest.mark.ranks(1)
def test_names_that_are_no_public_method_are_unknown(run) -> None:
    def names(world: Communicator) -> list[bool]:
        _, _, inner, optimizer = sam_of(world)
        assert inner.base_optimizer is not None
        return [hasattr(optimizer, name) for name in ("first_step", "base_optimizer", "_move", "nothing")]

    assert run(1, names) == [[True, False, False, False]]


class WithGroupsOfItsOwn(Sam):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.base_optimizer = optim.SGD([p for group in self.param_groups for p in group["params"]], lr=0.1)


@pytest.mark.ranks(2)
def test_pieces_are_refused_to_an_optimizer_inside_that_would_miss_them(run) -> None:
    def wrap(world: Communicator) -> None:
        net = model()
        DistributedOptimizer(
            WithGroupsOfItsOwn(net.parameters()), net, form(world, 1), bsp(), elementwise=True
        )

    with pytest.raises(UserError, match="has a SGD inside with param groups of its own"):
        run(2, wrap)
