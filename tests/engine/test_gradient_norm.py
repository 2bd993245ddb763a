"""The norm of the gradient that an update uses is that of autograd's own gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import hpcsgd
from hpcsgd.comm import Communicator
from hpcsgd.core.topology import form

SHAPES = [(1, 1), (2, 1), (1, 2), (3, 1), (2, 2), (1, 3)]


def net() -> nn.Module:
    """Return a model with 12 weights and 5 biases, which buckets do not divide evenly."""
    net = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 3))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    return net


def batch(rank: int, t: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * t + rank)
    return torch.randn(4, 3, generator=generator), torch.randint(3, (4,), generator=generator)


def plain(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    grads = torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters()))
    return torch.cat([g.flatten().double() for g in grads])


@pytest.mark.parametrize(("P", "K"), SHAPES)
@pytest.mark.parametrize("kind", ["Nesterov", "whole tensors"])
def test_against_autograd(run: Callable[..., list[Any]], P: int, K: int, kind: str) -> None:
    """The norm is computed only in steps in which it is wanted. Nesterov's momentum writes into gradients."""

    def one(world: Communicator) -> None:
        model, topology = net(), form(world, P)
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=True)
        optimizer = hpcsgd.DistributedOptimizer(
            inner,
            model,
            topology,
            hpcsgd.hierarchical(sync_every=2),
            bucket_cap_mb=4e-5,
            elementwise=kind == "Nesterov",
        )
        norm = optimizer.updating.norm
        for t in range(4):
            x, y = batch(world.rank, t)
            g = plain(model, x, y) / K
            topology.intra_group.allreduce(g).wait()
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            if t % 2:
                norm.want()
            optimizer.step()
            found = norm.take()
            assert (found is not None) == (t % 2 == 1)
            if found is not None:
                total = found.clone().reshape(1)
                topology.intra_group.allreduce(total).wait()
                assert total.item() == pytest.approx(g.square().sum().item(), rel=1e-5)

    run(P * K, one)
