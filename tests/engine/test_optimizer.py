"""What stays as in PyTorch around a `DistributedOptimizer`, and what it refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler

import hpcsgd
from hpcsgd import DistributedOptimizer, JobError, UserError, bsp, hierarchical
from hpcsgd.comm import Communicator
from hpcsgd.core.topology import form
from references import MakeOptimizer, batch, gathered_step, loss, one_step, vector
from references import model as make_model

STEPS = 6
MOMENTUM: MakeOptimizer = lambda params: optim.SGD(params, lr=0.1, momentum=0.9)  # noqa: E731


def plain(N: int, make: MakeOptimizer, before_step: Callable[[nn.Module], None] = lambda net: None) -> Tensor:
    """Train one process on the batch of N ranks, and return its parameters."""
    net = make_model()
    optimizer = make(list(net.parameters()))
    for t in range(STEPS):
        batches = [batch(t, rank) for rank in range(N)]
        optimizer.zero_grad()
        loss(net, torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])).backward()
        before_step(net)
        optimizer.step()
    return vector(net)


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("n", "P"), [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2)])
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clipping_is_exact(run, n: int, norm_type: float, P: int) -> None:
    """Clipping is tested with bsp, whose update uses the gradient of all ranks, in one level and in two."""

    def clipped(world: Communicator) -> tuple[Tensor, list[float]]:
        topology, net = form(world, groups=P), make_model()
        optimizer = DistributedOptimizer(MOMENTUM(list(net.parameters())), net, topology, bsp())
        norms = []
        for t in range(STEPS):
            optimizer.zero_grad()
            loss(net, *batch(t, world.rank)).backward()
            norms.append(optimizer.clip_grad_norm_(0.3, norm_type).item())
            optimizer.step()
        return vector(net), norms

    expected: list[float] = []

    def clip(net: nn.Module) -> None:
        expected.append(nn.utils.clip_grad_norm_(net.parameters(), 0.3, norm_type).item())

    reference = plain(n, MOMENTUM, clip)
    assert max(expected) > 0.3, "nothing was clipped"
    for ours, norms in run(n, clipped):
        close(ours, reference)
        assert norms == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("n", [1, 2])
def test_clipping_where_elements_lie_in_another_order(run, n: int) -> None:
    """Elements may lie in another order, as in channels_last, also if gradients stay in autograd's memory."""

    def clipped(world: Communicator) -> tuple[float, float]:
        net = nn.ParameterList([torch.arange(12.0).view(3, 4).t()])
        optimizer = DistributedOptimizer(
            optim.SGD(net.parameters(), 0.1), net, form(world, n), hierarchical(9)
        )
        net[0].square().sum().backward()
        norm = optimizer.clip_grad_norm_(1.0).item()
        return norm, net[0].grad.norm().item()

    for before, after in run(n, clipped):
        assert before == pytest.approx(2 * sum(x * x for x in range(12)) ** 0.5)
        assert after == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_accumulation_equals_the_larger_batch(run, n: int, overlap: bool) -> None:
    def accumulated(world: Communicator) -> Tensor:
        topology, net = form(world), make_model()
        inner = MOMENTUM(list(net.parameters()))
        optimizer = DistributedOptimizer(
            inner,
            net,
            topology,
            bsp(),
            gradient_accumulation_steps=2 if overlap else 1,
            overlap_grad_reduce=overlap,
        )
        for t in range(STEPS):
            optimizer.zero_grad()
            for half in zip(*(x.split([1, 2]) for x in batch(t, world.rank)), strict=True):
                (loss(net, *half) * len(half[1]) / 3).backward()
            optimizer.step()
        return vector(net)

    for ours in run(n, accumulated):
        close(ours, plain(n, MOMENTUM))


@pytest.mark.parametrize("n", [2, 4])
def test_undeclared_accumulation_is_refused(run, n: int) -> None:
    def twice(world: Communicator) -> None:
        net = make_model()
        DistributedOptimizer(MOMENTUM(list(net.parameters())), net, form(world), bsp())
        loss(net, *batch(0, 0)).backward()
        loss(net, *batch(1, 0)).backward()

    with pytest.raises(UserError, match=r"changed after it was sent: .* for several backward passes"):
        run(n, twice)


@pytest.mark.parametrize("n", [2, 4])
def test_gradients_changed_by_way_of_an_older_tensor_are_refused(run, n: int) -> None:
    def changed(world: Communicator) -> None:
        net = make_model()
        optimizer = DistributedOptimizer(MOMENTUM(list(net.parameters())), net, form(world), bsp())
        loss(net, *batch(0, 0)).backward()
        older = [param.grad[:1] for param in net.parameters() if param.grad is not None]
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        loss(net, *batch(1, 0)).backward()
        older[0].mul_(2)
        optimizer.step()

    with pytest.raises(UserError, match=r"by way of a tensor that is older: use param.grad itself"):
        run(n, changed)


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=STEPS),
    ],
)
@pytest.mark.parametrize("made_before", [True, False])
def test_schedulers_keep_working(run, n: int, schedule: Callable, made_before: bool) -> None:
    def scheduled(world: Communicator) -> Tensor:
        topology, net = form(world), make_model()
        inner = MOMENTUM(list(net.parameters()))
        groups = inner.param_groups
        scheduler = schedule(inner) if made_before else None
        optimizer = DistributedOptimizer(inner, net, topology, bsp())
        scheduler = scheduler or schedule(optimizer)
        for t in range(STEPS):
            one_step(net, optimizer, topology, t)
            scheduler.step()
        assert all(a is b for a, b in zip(groups, optimizer.param_groups, strict=True))
        return vector(net)

    net = make_model()
    optimizer = MOMENTUM(list(net.parameters()))
    scheduler = schedule(optimizer)
    for t in range(STEPS):
        gathered_step(net, optimizer, t, range(n))
        scheduler.step()
    for ours in run(n, scheduled):
        close(ours, vector(net))


def two_groups(net: nn.Module) -> optim.Optimizer:
    biases = [p for p in net.parameters() if p.dim() == 1]
    weights = [p for p in net.parameters() if p.dim() > 1]
    return optim.AdamW(
        [{"params": biases, "lr": 0.02, "weight_decay": 0.0}, {"params": weights, "weight_decay": 0.1}],
        lr=0.01,
    )


@pytest.mark.parametrize("n", [1, 2, 4])
def test_param_groups_keep_their_options(run, n: int) -> None:
    def grouped(world: Communicator) -> Tensor:
        topology, net = form(world), make_model()
        optimizer = DistributedOptimizer(two_groups(net), net, topology, bsp())
        for t in range(STEPS):
            one_step(net, optimizer, topology, t)
        return vector(net)

    net = make_model()
    optimizer = two_groups(net)
    for t in range(STEPS):
        gathered_step(net, optimizer, t, range(n))
    for ours in run(n, grouped):
        close(ours, vector(net))


@pytest.mark.parametrize("n", [1, 2, 4])
def test_frozen_and_tied_parameters(run, n: int) -> None:
    def tied() -> nn.Module:
        net = make_model()
        net.append(nn.Linear(3, 3, bias=False).double())
        net.append(nn.Linear(3, 3, bias=False).double())
        with torch.no_grad():
            net[4].weight.copy_(torch.eye(3) / 2)
        net[5].weight = net[4].weight
        net[0].weight.requires_grad_(False)
        return net

    def trained(world: Communicator) -> Tensor:
        topology, net = form(world), tied()
        with torch.no_grad():
            net[0].weight.add_(world.rank)  # frozen, but wrapping makes it the same on all ranks
        optimizer = DistributedOptimizer(MOMENTUM(list(net.parameters())), net, topology, bsp())
        for t in range(STEPS):
            one_step(net, optimizer, topology, t)
        return vector(net)

    net = tied()
    optimizer = MOMENTUM(list(net.parameters()))
    for t in range(STEPS):
        gathered_step(net, optimizer, t, range(n))
    for ours in run(n, trained):
        close(ours, vector(net))


@pytest.mark.parametrize("n", [1, 2, 4])
def test_optimizer_state_is_divided_by_K(run, n: int) -> None:
    def elements(world: Communicator) -> tuple[int, int]:
        topology, net = form(world), make_model()
        inner = optim.Adam(net.parameters())
        optimizer = DistributedOptimizer(inner, net, topology, bsp())
        one_step(net, optimizer, topology, 0)
        tensors = [x for state in inner.state.values() for x in state.values() if x.dim()]
        return sum(x.numel() for x in tensors), sum(p.numel() for p in net.parameters())

    held = run(n, elements)
    M = held[0][1]
    assert sum(count for count, _ in held) == 2 * M
    assert max(count for count, _ in held) <= 2 * -(-M // n)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_state_goes_to_a_plain_optimizer_and_back(run, n: int) -> None:
    def through(world: Communicator) -> tuple[Tensor, Tensor]:
        topology, net = form(world), make_model()
        optimizer = DistributedOptimizer(optim.Adam(net.parameters()), net, topology, bsp())
        for t in range(3):
            one_step(net, optimizer, topology, t)
        alone = copy.deepcopy(net)
        theirs = optim.Adam(alone.parameters())
        theirs.load_state_dict({k: v for k, v in optimizer.state_dict().items() if k != "hpcsgd"})
        back = copy.deepcopy(alone)
        again = DistributedOptimizer(optim.Adam(back.parameters()), back, topology, bsp())
        again.load_state_dict(theirs.state_dict())
        for t in range(3, STEPS):
            one_step(back, again, topology, t)
            gathered_step(alone, theirs, t, range(n))
        return vector(back), vector(alone)

    for ours, theirs in run(n, through):
        close(ours, theirs)


@pytest.mark.parametrize("n", [1, 2])
def test_state_from_before_the_wrapping_is_kept(run, n: int) -> None:
    """Adagrad has state from the start, and here it has already made steps before wrapping."""

    def wrapped_late(world: Communicator) -> Tensor:
        topology, net = form(world), make_model()
        inner = optim.Adagrad(net.parameters(), lr=0.1)
        for t in range(2):
            gathered_step(net, inner, t, range(n))
        optimizer = DistributedOptimizer(inner, net, topology, bsp())
        for t in range(2, STEPS):
            one_step(net, optimizer, topology, t)
        return vector(net)

    for ours in run(n, wrapped_late):
        close(ours, plain(n, lambda params: optim.Adagrad(params, lr=0.1)))


@pytest.mark.parametrize("n", [1, 2, 4])
def test_parameters_loaded_after_the_wrapping_count(run, n: int) -> None:
    def loaded(world: Communicator) -> Tensor:
        topology, net = form(world), make_model(seed=5)
        optimizer = DistributedOptimizer(MOMENTUM(list(net.parameters())), net, topology, bsp())
        net.load_state_dict(make_model().state_dict())
        for t in range(STEPS):
            one_step(net, optimizer, topology, t)
        return vector(net)

    for ours in run(n, loaded):
        close(ours, plain(n, MOMENTUM))


@pytest.mark.parametrize("n", [1, 2])
def test_what_cannot_be_distributed_is_refused(run, n: int) -> None:
    def refusals(world: Communicator) -> list[str]:
        topology = form(world)

        def message(attempt: Callable[[], object]) -> str:
            with pytest.raises(UserError) as error:
                attempt()
            return str(error.value)

        net = make_model()
        inner = MOMENTUM(list(net.parameters()))
        optimizer = DistributedOptimizer(inner, net, topology, hierarchical(2))
        frozen = make_model().requires_grad_(False)
        return [
            message(lambda: DistributedOptimizer(optimizer, net, topology, bsp())),
            message(
                lambda: DistributedOptimizer(optim.LBFGS(make_model().parameters()), net, topology, bsp())
            ),
            message(
                lambda: DistributedOptimizer(MOMENTUM(list(frozen.parameters())), frozen, topology, bsp())
            ),
            message(lambda: optimizer.add_param_group({"params": [torch.zeros(1)]})),
            message(inner.step),
            message(lambda: hierarchical(0)),
        ]

    expected = ["already", "LBFGS", "no trainable", "add_param_group", "step", "sync_every = 0"]
    for messages in run(n, refusals):
        assert all(word in message for word, message in zip(expected, messages, strict=True))


@pytest.mark.parametrize("n", [2, 4])
def test_models_that_differ_between_ranks_end_all(run, n: int) -> None:
    def differing(world: Communicator) -> str:
        net = nn.Linear(3, 2 + (world.rank == 1))
        with pytest.raises(JobError) as error:
            DistributedOptimizer(optim.SGD(net.parameters(), 0.1), net, form(world), bsp())
        return str(error.value)

    messages = run(n, differing)
    assert messages[0].startswith("ranks 0 and 1 differ: parameter weight is of shape (2, 3)")
    assert len(messages) == n


@pytest.mark.parametrize("n", [1, 2])
def test_closure(run, n: int) -> None:
    def closed(world: Communicator) -> Tensor:
        topology, net = form(world), make_model()
        optimizer = DistributedOptimizer(MOMENTUM(list(net.parameters())), net, topology, bsp())
        for t in range(STEPS):

            def closure(t: int = t) -> Tensor:
                optimizer.zero_grad()
                value = loss(net, *batch(t, world.rank))
                value.backward()
                return value

            assert optimizer.step(closure) > 0
        return vector(net)

    for ours in run(n, closed):
        close(ours, plain(n, MOMENTUM))


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_of_either_kind(run, n: int, set_to_none: bool) -> None:
    """Training goes on after gradients are zeroed or dropped, although they are views."""

    def zeroed(world: Communicator) -> Tensor:
        topology, net = form(world), make_model()
        inner = MOMENTUM(list(net.parameters()))
        optimizer = DistributedOptimizer(inner, net, topology, bsp())
        for t in range(STEPS):
            loss(net, *batch(t, world.rank)).backward()
            optimizer.step()
            (optimizer, net, inner)[t % 3].zero_grad(set_to_none=set_to_none)
        return vector(net)

    for ours in run(n, zeroed):
        close(ours, plain(n, MOMENTUM))


def test_public_names() -> None:
    assert all(getattr(hpcsgd, name) is not None for name in hpcsgd.__all__)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("order", [2.0, float("inf"), 1.0])
def test_clipping_where_a_position_owns_nothing(run, order: float) -> None:
    def norm(world: Communicator) -> float:
        net = nn.Linear(1, 1, bias=False)
        optimizer = hpcsgd.DistributedOptimizer(optim.SGD(net.parameters(), lr=0.1), net, form(world), bsp())
        (3 * net(torch.ones(1, 1))).sum().backward()
        return optimizer.clip_grad_norm_(1.0, order).item()

    assert run(2, norm) == [3.0, 3.0]
