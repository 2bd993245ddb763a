"""Gradients are checked for overflow after the reduction, so that all ranks skip the same steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import hpcsgd
from hpcsgd.comm import Communicator, threads
from hpcsgd.core.replica_groups import Absent
from hpcsgd.core.topology import form
from hpcsgd.errors import UserError
from hpcsgd.methods import Method, adacomm, bsp, ensemble_sync, hierarchical, selsync, sgp
from hpcsgd.parts.grad_reduces import Sparse
from hpcsgd.parts.sparsifiers import TopK
from references import average, batch, gathered_gradient, loss, model, vector

STEPS, EVERY, GROWTH = 9, 2, 2
BAD = {2: 1, 5: 0}
"""By step: the rank whose loss is infinite."""
SHAPES = [(1, 2), (2, 1), (1, 4), (2, 2), (4, 1)]


def sgd(net: nn.Module) -> optim.Optimizer:
    return optim.SGD(net.parameters(), lr=0.2, momentum=0.9)


def distributed(
    world: Communicator, P: int, method: Method, clip: bool
) -> tuple[list[Tensor], list[float], int]:
    """Return the parameters and the scale after every step, and the number of updates."""
    net = model(dtype=torch.float32)
    optimizer = hpcsgd.DistributedOptimizer(sgd(net), net, form(world, groups=P), method, bucket_cap_mb=1e-4)
    scaler = hpcsgd.GradScaler("cpu", init_scale=2.0**10, growth_interval=GROWTH)
    history, scales = [], []
    for t in range(STEPS):
        optimizer.zero_grad()
        value = loss(net, *batch(t, world.rank, torch.float32))
        if BAD.get(t) == world.rank:
            value = value * float("inf")
        scaler.scale(value).backward()
        if clip:
            scaler.unscale_(optimizer)
            optimizer.clip_grad_norm_(0.5)
        scaler.step(optimizer)
        scaler.update()
        history.append(vector(net))
        scales.append(scaler.get_scale())
    return history, scales, optimizer.t


def plain(P: int, K: int, clip: bool) -> tuple[list[list[Tensor]], list[float]]:
    """Train P processes in plain torch, without scaling and without the bad steps.

    Returns the parameters as [step][group], and the scales.
    """
    nets = [model(dtype=torch.float32) for _ in range(P)]
    optimizers = [sgd(net) for net in nets]
    history, scales, scale, good, done = [], [], 2.0**10, 0, 0
    for t in range(STEPS):
        if t in BAD:
            scale, good = scale / 2, 0
        else:
            for g, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
                _gathered(net, optimizer, t, range(g * K, (g + 1) * K))
                if clip:
                    nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                optimizer.step()
            done, good = done + 1, good + 1
            if good == GROWTH:
                scale, good = scale * 2, 0
            if done % EVERY == 0:
                average(nets)
        history.append([vector(net) for net in nets])
        scales.append(scale)
    return history, scales


def _gathered(net: nn.Module, optimizer: optim.Optimizer, t: int, ranks: range) -> None:
    optimizer.zero_grad()
    batches = [batch(t, rank, torch.float32) for rank in ranks]
    loss(net, torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])).backward()


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize(("P", "K"), SHAPES)
def test_it_is_the_training_without_the_bad_steps(run, P: int, K: int, clip: bool) -> None:
    """Synchronizations also count only the steps that were made."""
    expected, scales = plain(P, K, clip)
    for rank, (history, theirs, t) in enumerate(run(P * K, distributed, P, hierarchical(EVERY), clip)):
        assert theirs == scales
        assert t == STEPS - len(BAD)
        for mine, groups in zip(history, expected, strict=True):
            torch.testing.assert_close(mine, groups[rank // K], rtol=0, atol=2e-5)


@pytest.mark.ranks(2)
def test_gradients_are_unscaled_where_they_are_read(run) -> None:
    """Both the gradients that this rank updates by and those of other ranks, read before, are unscaled."""

    def norms(net: nn.Module) -> Tensor:
        return torch.stack([p.grad.norm() for p in net.parameters() if p.grad is not None])

    def train(world: Communicator) -> tuple[Tensor, Tensor]:
        net = model()
        optimizer = hpcsgd.DistributedOptimizer(sgd(net), net, form(world), bsp())
        scaler = hpcsgd.GradScaler("cpu", init_scale=2.0**10)
        scaler.scale(loss(net, *batch(0, world.rank))).backward()
        before = norms(net)
        scaler.unscale_(optimizer)
        return before, norms(net)

    for before, after in run(2, train):
        torch.testing.assert_close(after, before / 2**10)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("make", [bsp, sgp, lambda: selsync(0.3)])
def test_any_dense_method_skips_together(run, make: Any) -> None:
    for history, _, t in run(4, lambda world: distributed(world, 2, make(), clip=False)):
        assert t == STEPS - len(BAD)
        for bad in BAD:
            assert torch.equal(history[bad], history[bad - 1])
        assert all(w.isfinite().all() for w in history)


@pytest.mark.ranks(4)
def test_a_position_that_owns_nothing(run) -> None:
    """One parameter with one element is divided among four ranks, so three of them own nothing."""

    def trained(world: Communicator) -> tuple[float, float]:
        net = nn.Linear(1, 1, bias=False)
        optimizer = hpcsgd.DistributedOptimizer(optim.SGD(net.parameters(), lr=0.5), net, form(world), bsp())
        with torch.no_grad():
            net.weight.fill_(1.0)
        scaler = hpcsgd.GradScaler("cpu", init_scale=4.0)
        scaler.scale(net(torch.ones(1, 1)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        return net.weight.item(), scaler.get_scale()

    assert run(4, trained) == [(0.5, 4.0)] * 4


@pytest.mark.ranks(2)
@pytest.mark.parametrize("P", [1, 2])
def test_torchs_own_is_refused_with_what_to_do(run, P: int) -> None:
    def trained(world: Communicator) -> None:
        net = model(dtype=torch.float32)
        optimizer = hpcsgd.DistributedOptimizer(sgd(net), net, form(world, groups=P), hierarchical(2))
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss(net, *batch(0, world.rank, torch.float32))).backward()
        scaler.step(optimizer)

    with pytest.raises(UserError, match=r"use hpcsgd\.GradScaler in its place"):
        run(2, trained)


@pytest.mark.ranks(2)
def test_one_that_is_switched_off_is_nothing(run) -> None:
    def trained(world: Communicator) -> int:
        net = model(dtype=torch.float32)
        optimizer = hpcsgd.DistributedOptimizer(sgd(net), net, form(world), hierarchical(2))
        for scaler in (torch.amp.GradScaler("cpu", enabled=False), hpcsgd.GradScaler("cpu", enabled=False)):
            scaler.scale(loss(net, *batch(0, world.rank, torch.float32))).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return optimizer.t

    assert run(2, trained) == [2, 2]


def test_refusals() -> None:
    def scaled(world: Communicator, case: str) -> None:
        net, topology = model(dtype=torch.float32), form(world)
        method = bsp(Sparse(TopK(0.5))) if case == "sparse" else bsp()
        if case == "replica_groups":
            topology, method = replace(topology, replica_groups=Absent(count=2)), ensemble_sync(sync_every=2)
        optimizer = hpcsgd.DistributedOptimizer(sgd(net), net, topology, method)
        scaler = hpcsgd.GradScaler("cpu")
        scaler.scale(loss(net, *batch(0, world.rank, torch.float32))).backward()
        scaler.step(optimizer)

    for case, message in {
        "sparse": "GradScaler: the gradient reduction keeps gradients",
        "replica_groups": "GradScaler: groups that may die",
    }.items():
        with pytest.raises(UserError, match=message):
            threads.run(2, scaled, case)


@pytest.mark.ranks(2)
def test_without_ranks_it_is_torchs(run) -> None:
    """Around an optimizer that is not distributed, the scaler works as torch's own."""

    def trained(world: Communicator) -> Tensor:
        net = model(dtype=torch.float32)
        optimizer, scaler = sgd(net), hpcsgd.GradScaler("cpu")
        scaler.scale(loss(net, *batch(0, 0, torch.float32))).backward()
        scaler.step(optimizer)
        return vector(net)

    other = model(dtype=torch.float32)
    optimizer = sgd(other)
    gathered = model(dtype=torch.float64)
    gathered_gradient(gathered, sgd(gathered), 0, range(1))
    _gathered(other, optimizer, 0, range(1))
    optimizer.step()
    assert torch.allclose(run(2, trained)[0], vector(other), rtol=0, atol=1e-6)


def natural(world: Communicator, scaler: torch.amp.GradScaler | None) -> Tensor:
    net = model(dtype=torch.float32)
    wrapped = hpcsgd.DistributedOptimizer(sgd(net), net, form(world, groups=2), hierarchical(EVERY))
    optimizer = hpcsgd.NaturalGradient(wrapped, net, rank=2)
    try:
        for t in range(4):
            optimizer.zero_grad()
            value = loss(net, *batch(t, world.rank, torch.float32))
            (value if scaler is None else scaler.scale(value)).backward()
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
    finally:
        optimizer.remove()
    return vector(net)


@pytest.mark.ranks(4)
def test_around_a_natural_gradient(run) -> None:
    """Natural gradient does not depend on the size of the loss."""
    plain = run(4, natural, None)
    scaled = run(4, lambda world: natural(world, hpcsgd.GradScaler("cpu", init_scale=2.0**8)))
    for mine, theirs in zip(scaled, plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-3)
    with pytest.raises(UserError, match=r"use hpcsgd\.GradScaler in its place"):
        run(4, lambda world: natural(world, torch.amp.GradScaler("cpu")))


@pytest.mark.ranks(2)
def test_who_has_no_batch_after_a_skipped_step(run) -> None:
    """The missing gradient counts as zero. What was reduced for the skipped step is not checked again."""

    def trained(world: Communicator) -> tuple[int, float]:
        net = model(dtype=torch.float32)
        optimizer = hpcsgd.DistributedOptimizer(sgd(net), net, form(world), bsp(), bucket_cap_mb=1e-4)
        scaler = hpcsgd.GradScaler("cpu", init_scale=4.0)
        for t in range(3):
            optimizer.zero_grad()
            value = scaler.scale(loss(net, *batch(t, world.rank, torch.float32)))
            if t != 1 or world.rank != 0:
                (value * float("inf") if t == 0 else value).backward()
            scaler.step(optimizer)
            scaler.update()
        return optimizer.t, scaler.get_scale()

    assert run(2, trained) == [(2, 2.0)] * 2


def heard(world: Communicator, natural: bool, scaled: bool) -> list[bool]:
    """Return for each step whether the method had the loss as it was before it was `scaled`."""
    net, topology = model(dtype=torch.float32), form(world, groups=2)
    wrapped = hpcsgd.DistributedOptimizer(sgd(net), net, topology, adacomm(2, adapt_every=2))
    optimizer: Any = hpcsgd.NaturalGradient(wrapped, net, rank=2) if natural else wrapped
    scaler = hpcsgd.GradScaler("cpu", init_scale=2.0**4, enabled=scaled)
    seen = []
    try:
        for t in range(3):
            optimizer.zero_grad()
            value = loss(net, *batch(t, world.rank, torch.float32))
            scaler.scale(value).backward()
            if scaled:
                scaler.step(optimizer, loss=value)
                scaler.update()
            else:
                optimizer.step(loss=value)
            seen.append(value.item() == wrapped._step.loss)
    finally:
        if natural:
            optimizer.remove()
    return seen


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("natural", "scaled"), [(True, False), (False, True), (True, True)])
def test_methods_that_go_by_the_loss_are_given_it(run, natural: bool, scaled: bool) -> None:
    assert run(2, heard, natural, scaled) == [[True] * 3] * 2
