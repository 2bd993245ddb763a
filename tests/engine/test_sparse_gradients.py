"""Sparse gradients where none is reduced: each group trains and clips as a separate process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import hpcsgd
from hpcsgd.comm import Communicator, threads
from hpcsgd.core.topology import form
from hpcsgd.errors import UserError
from hpcsgd.methods import Method


def net() -> nn.Module:
    made = nn.Sequential(nn.EmbeddingBag(10, 4, sparse=True, mode="sum"), nn.Linear(4, 3)).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in made.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))
    return made


def words(t: int, rank: int) -> Tensor:
    """Return words, some of which occur twice."""
    return torch.randint(0, 6, (3, 5), generator=torch.Generator().manual_seed(10 * t + rank))


def trained(model: nn.Module, optimizer: Any, rank: int, clip: Any) -> dict[str, Tensor]:
    norms: list[Tensor] = []
    for t in range(4):
        optimizer.zero_grad()
        model(words(t, rank)).square().mean().backward()
        norms.append(torch.as_tensor(clip(model, optimizer)).double())
        optimizer.step()
    return {**model.state_dict(), "norms": torch.stack(norms)}


def by_hand(model: nn.Module, _: Any) -> Tensor:
    """Clip explicitly, because torch does not clip sparse gradients, and return the norm."""
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    norm = torch.stack([grad.to_dense().square().sum() for grad in grads]).sum().sqrt()
    for grad in grads:
        grad.mul_((0.5 / (norm + 1e-6)).clamp(max=1))
    return norm


@pytest.mark.ranks(3)
def test_clipping_goes_by_every_element_once(run) -> None:
    def body(world: Communicator) -> dict[str, Tensor]:
        model, method = net(), hpcsgd.hierarchical(100)
        optimizer = optim.SGD(model.parameters(), 0.1)
        optimizer = hpcsgd.DistributedOptimizer(optimizer, model, form(world, 3), method)
        return trained(model, optimizer, world.rank, lambda _, optimizer: optimizer.clip_grad_norm_(0.5))

    for rank, mine in enumerate(run(3, body)):
        alone = net()
        expected = trained(alone, optim.SGD(alone.parameters(), 0.1), rank, by_hand)
        for name, value in expected.items():
            torch.testing.assert_close(mine[name], value)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "method", [hpcsgd.selsync(0.1), hpcsgd.hierarchical(2)], ids=["selsync", "hierarchical"]
)
def test_methods_that_look_at_the_gradient_train(run, method: Method) -> None:
    def body(world: Communicator) -> dict[str, Tensor]:
        model = net()
        optimizer: Any = optim.SGD(model.parameters(), 0.1)
        optimizer = hpcsgd.DistributedOptimizer(optimizer, model, form(world, 2), copy.deepcopy(method))
        optimizer.updating.norm.want()
        trained(model, optimizer, world.rank, lambda *_: 0.0)
        with optimizer.averaged_model():
            return copy.deepcopy(model.state_dict())

    first, second = run(2, body)
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert all(value.isfinite().all() for value in first.values())


def test_in_a_group_they_are_refused() -> None:
    def body(world: Communicator) -> None:
        model = net()
        optimizer: Any = optim.SGD(model.parameters(), 0.1)
        optimizer = hpcsgd.DistributedOptimizer(optimizer, model, form(world, 1), hpcsgd.bsp())
        with pytest.raises(UserError, match=r"gradient of 0\.weight is sparse, but only dense ones"):
            trained(model, optimizer, world.rank, lambda *_: 0.0)

    threads.run(2, body)
