"""Narrow parameters with float32 masters are updated in float32 from narrow gradients, and rounded once."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import hpcsgd
from hpcsgd.comm import Communicator, threads
from hpcsgd.core.topology import form
from hpcsgd.engine.master import Master
from hpcsgd.errors import UserError
from hpcsgd.methods import Method, bsp, hierarchical
from hpcsgd.parts.grad_reduces import Sparse
from hpcsgd.parts.sparsifiers import TopK
from references import batch, loss, model

NARROW = torch.bfloat16
STEPS, EVERY = 7, 3
SHAPES = [(1, 1), (2, 1), (1, 2), (1, 4), (2, 2)]
Make = Callable[[list[Tensor]], optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "momentum": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-3, foreach=False),
    "AdamW": lambda params: optim.AdamW(params, lr=0.01, foreach=False),
}


def narrow_model() -> nn.Module:
    return model(dtype=torch.float32).to(NARROW)


def gradients(net: nn.Module, t: int, rank: int) -> list[Tensor]:
    x, y = batch(t, rank, torch.float32)
    return list(torch.autograd.grad(loss(net, x.to(NARROW), y), list(net.parameters())))


Held = tuple[list[Tensor], list[Tensor]]
"""The parameters and their masters."""


def distributed(world: Communicator, P: int, name: str, **options: Any) -> list[Held]:
    """Train, and return the parameters and masters after every step."""
    net = narrow_model()
    optimizer = hpcsgd.DistributedOptimizer(
        OPTIMIZERS[name](list(net.parameters())), net, form(world, groups=P), hierarchical(EVERY),
        bucket_cap_mb=1e-4, master_dtype=torch.float32, **options,
    )  # fmt: skip
    history = []
    for t in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(t, world.rank, torch.float32)
        loss(net, x.to(NARROW), y).backward()
        optimizer.step()
        state = optimizer.state_dict()["state"]
        masters = [state[i]["master"].clone() for i in range(len(state))]
        history.append(([p.detach().clone() for p in net.parameters()], masters))
    return history


def plain(P: int, K: int, name: str) -> list[list[Held]]:
    """Train P processes in plain torch, and return [step][group] → parameters and masters."""
    nets = [narrow_model() for _ in range(P)]
    masters = [[p.detach().float() for p in net.parameters()] for net in nets]
    optimizers = [OPTIMIZERS[name](each) for each in masters]
    history = []
    for t in range(STEPS):
        for g, (net, ms, optimizer) in enumerate(zip(nets, masters, optimizers, strict=True)):
            ranks = [gradients(net, t, g * K + j) for j in range(K)]
            for p, m, gs in zip(net.parameters(), ms, zip(*ranks, strict=True), strict=True):
                moved = m + (p.detach().float() - m.to(NARROW).float())
                m.copy_(torch.where(moved.to(NARROW) == p.detach(), moved, p.detach().float()))
                m.grad = torch.stack(gs).mean(0).float()
            optimizer.step()
            for p, m in zip(net.parameters(), ms, strict=True):
                p.data.copy_(m)
        if (t + 1) % EVERY == 0:
            for ps in zip(*(net.parameters() for net in nets), strict=True):
                mean = torch.stack([p.detach().float() for p in ps]).mean(0).to(NARROW)
                for p in ps:
                    p.data.copy_(mean)
        history.append(
            [([p.detach().clone() for p in net.parameters()], [m.clone() for m in ms])
             for net, ms in zip(nets, masters, strict=True)]
        )  # fmt: skip
    return history


@pytest.mark.threads(unless={"P": 2, "K": 2, "name": "AdamW"})
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("P", "K"), SHAPES)
def test_it_is_the_float32_update_of_the_masters(run, P: int, K: int, name: str) -> None:
    """Masters have the bits of a float32 update by the mean of narrow gradients.

    Parameters are their rounding, except just after a synchronization.
    """
    expected = plain(P, K, name)
    for rank, history in enumerate(run(P * K, distributed, P, name)):
        for (mine, masters), groups in zip(history, expected, strict=True):
            theirs, their_masters = groups[rank // K]
            assert all(map(torch.equal, mine, theirs))
            assert all(m.dtype == torch.float32 for m in masters)
            assert all(map(torch.equal, masters, their_masters))


@pytest.mark.ranks(2)
def test_whole_tensors_on_every_position(run) -> None:
    """An optimizer that is not known to be element-wise updates whole tensors on every rank."""
    for history in run(2, lambda world: distributed(world, 1, "AdamW", elementwise=False)):
        for (mine, masters), groups in zip(history, plain(1, 2, "AdamW"), strict=True):
            assert all(map(torch.equal, mine, groups[0][0]))
            assert all(map(torch.equal, masters, groups[0][1]))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("P", [1, 2])
def test_updates_of_less_than_half_an_ulp_add_up(run, P: int) -> None:
    """An ulp of 256 is 2 in bfloat16, so the value does not change without a master."""

    def moved(world: Communicator, master: torch.dtype | None) -> float:
        net = nn.Linear(1, 1, bias=False).to(NARROW)
        with torch.no_grad():
            net.weight.fill_(256.0)
        inner = optim.SGD(net.parameters(), lr=1.0)
        optimizer = hpcsgd.DistributedOptimizer(inner, net, form(world, groups=P), bsp(), master_dtype=master)
        for _ in range(8):
            optimizer.zero_grad()
            (net(torch.ones(1, 1, dtype=NARROW)) * -0.5).sum().backward()
            optimizer.step()
        return net.weight.item()

    assert run(2, moved, torch.float32) == [260.0] * 2
    assert run(2, moved, None) == [256.0] * 2


def test_a_master_follows_whoever_moves_the_parameters() -> None:
    """If the parameters change, the master changes by as much and keeps its extra bits.

    If they do not change, the master keeps all its bits.
    """
    m = Master.of(torch.tensor([256.0, -3.0, 1e-3]).to(NARROW), torch.float32)
    m.m.add_(torch.tensor([0.3, 0.001, 0.0]))
    before = m.m.clone()
    m.follow()
    assert torch.equal(m.m, before)
    m.w.copy_(torch.tensor([300.0, 4.0, 0.5]))
    m.follow()
    assert m.m.tolist() == pytest.approx([300.3, 4.001, 0.5])
    m.give()
    assert torch.equal(m.w, m.m.to(NARROW))


@pytest.mark.parametrize("given", [0.0, -0.02, 1e-30, 3.0, math.inf, math.nan])
@pytest.mark.parametrize("before", [500.7, 1e-3, 1e30, math.inf, -math.inf, math.nan])
def test_what_parameters_are_set_to_is_what_training_continues_from(before: float, given: float) -> None:
    """A master that rounds to another value than its parameter would change it in the next step."""
    for dtype, offset in [(NARROW, 0.0), (NARROW, 0.3), (torch.float16, 0.1), (torch.complex64, 1e-9j)]:
        m = Master.of(torch.full((3,), before).to(dtype), torch.float64)
        m.m.add_(offset)
        m.give()
        m.w.fill_(given)
        expected = m.w.clone()
        m.follow()
        m.give()
        torch.testing.assert_close(m.w, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("P", "K"), [(1, 1), (1, 2), (2, 2)])
def test_weights_loaded_after_a_step_that_was_not_finite(run, P: int, K: int) -> None:
    def loaded(world: Communicator) -> bool:
        net = narrow_model()
        good = copy.deepcopy(net.state_dict())
        inner = optim.SGD(net.parameters(), lr=0.1)
        optimizer = hpcsgd.DistributedOptimizer(
            inner, net, form(world, groups=P), hierarchical(2), master_dtype=torch.float32
        )
        for scale in (math.inf, 0.0):
            optimizer.zero_grad()
            (net(torch.ones(1, 5, dtype=NARROW)).sum() * scale).backward()
            optimizer.step()
            net.load_state_dict(good)
        optimizer.zero_grad()
        (net(torch.ones(1, 5, dtype=NARROW)).sum() * 0.0).backward()
        optimizer.step()
        return all(torch.equal(x, good[name]) for name, x in net.state_dict().items())

    assert run(P * K, loaded) == [True] * (P * K)


@pytest.mark.ranks(3)
def test_a_group_that_a_guard_has_left_out_is_finite_again(run) -> None:
    def trained(world: Communicator) -> list[bool]:
        net = narrow_model()
        method = hierarchical(2, guard=hpcsgd.PseudoGradientPenalty())
        inner = optim.SGD(net.parameters(), lr=0.01)
        optimizer = hpcsgd.DistributedOptimizer(
            inner, net, form(world, groups=3), method, master_dtype=torch.float32
        )
        finite = []
        for t in range(6):
            x, y = batch(t, world.rank, torch.float32)
            optimizer.zero_grad()
            (loss(net, x.to(NARROW), y) * (math.inf if (t, world.rank) == (2, 2) else 1.0)).backward()
            optimizer.step()
            finite.append(all(p.isfinite().all() for p in net.parameters()))
        return finite

    assert run(3, trained) == [[True] * 6, [True] * 6, [True, True, False, True, True, True]]


@pytest.mark.ranks(4)
def test_what_it_costs(run) -> None:
    """State and masters each have M/K elements of 4 bytes; messages have elements of 2 bytes."""

    def sizes(world: Communicator) -> tuple[int, set[torch.dtype], float, float]:
        net = nn.Linear(32, 8, bias=False).to(NARROW)
        inner = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        optimizer = hpcsgd.DistributedOptimizer(
            inner, net, form(world, groups=1), bsp(), master_dtype=torch.float32
        )
        net(torch.ones(2, 32, dtype=NARROW)).float().sum().backward()
        optimizer.step()
        assert all(held.tensor.grad is None for held in optimizer.local.held)
        state = optimizer.local.tensors()["momentum_buffer"]
        held = [h.tensor for h in optimizer.local.held]
        sent = world.stats.totals()
        return (
            sum(x.numel() for x in state + held),
            {x.dtype for x in state + held},
            sent["grad_reduce"].bytes,
            sent["param_gather"].bytes,
        )

    M, K = 256, 4
    for numel, dtypes, gradients_bytes, parameters_bytes in run(K, sizes):
        assert (numel, dtypes) == (2 * M // K, {torch.float32})
        assert gradients_bytes == parameters_bytes == 2 * M * (K - 1) / K


@pytest.mark.ranks(2)
def test_wide_parameters_need_none(run) -> None:
    """Wide parameters in the same model are updated directly."""

    def kept(world: Communicator) -> set[str]:
        net = nn.Sequential(nn.Linear(4, 4).to(NARROW), nn.Linear(4, 2))
        inner = optim.SGD(net.parameters(), lr=0.1)
        optimizer = hpcsgd.DistributedOptimizer(
            inner, net, form(world, groups=1), bsp(), master_dtype=torch.float32
        )
        narrow = set(net[0].parameters())
        assert all((held.master is not None) == (held.param in narrow) for held in optimizer.local.held)
        return {name for state in optimizer.state_dict()["state"].values() for name in state}

    assert run(2, kept) == [{"master"}] * 2


@pytest.mark.ranks(2)
def test_a_state_with_masters_needs_them(run) -> None:
    def taken(world: Communicator) -> None:
        def made(master: torch.dtype | None) -> hpcsgd.DistributedOptimizer:
            net = narrow_model()
            inner = optim.SGD(net.parameters(), lr=0.1)
            return hpcsgd.DistributedOptimizer(inner, net, form(world, groups=1), bsp(), master_dtype=master)

        state = made(torch.float32).state_dict()
        made(None).load_state_dict(state)

    with pytest.raises(UserError, match=r"optimizer state with master weights: give .*\(master_dtype="):
        run(2, taken)


@pytest.mark.parametrize("P", [1, 2])
def test_a_scaler_is_refused(P: int) -> None:
    def scaled(world: Communicator) -> None:
        net = narrow_model()
        inner = optim.SGD(net.parameters(), lr=0.1)
        optimizer = hpcsgd.DistributedOptimizer(
            inner, net, form(world, groups=P), bsp(), master_dtype=torch.float32
        )
        scaler = hpcsgd.GradScaler("cpu")
        x, y = batch(0, world.rank, torch.float32)
        scaler.scale(loss(net, x.to(NARROW), y)).backward()
        scaler.step(optimizer)

    with pytest.raises(UserError, match="GradScaler: master weights"):
        threads.run(2, scaled)


@pytest.mark.ranks(2)
def test_clipped_and_sparse_gradients_arrive(run) -> None:
    """Clipping and sparse reduction work on narrow gradients, as these were sent."""

    def trained(world: Communicator, method: Callable[[], Method], clip: float) -> Tensor:
        net = nn.Linear(2, 2, bias=False).to(NARROW)
        with torch.no_grad():
            net.weight.zero_()
        inner = optim.SGD(net.parameters(), lr=1.0)
        optimizer = hpcsgd.DistributedOptimizer(
            inner, net, form(world, groups=1), method(), master_dtype=torch.float32
        )
        net.weight.grad = None
        (net(torch.tensor([[3.0, 4.0]]).to(NARROW))[0, 0]).backward()
        optimizer.clip_grad_norm_(clip)
        optimizer.step()
        return net.weight.detach().float()

    for found in run(2, trained, bsp, 2.5):
        torch.testing.assert_close(found[0], torch.tensor([-1.5, -2.0]), rtol=2**-8, atol=0)
    for found in run(2, trained, lambda: bsp(Sparse(TopK(0.25))), 100.0):
        assert found.tolist() == [[0.0, -4.0], [0.0, 0.0]]
