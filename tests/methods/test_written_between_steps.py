"""Changes of the parameters between two steps, such as clamped or loaded weights, are part of training."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn, optim

import hpcsgd
from hpcsgd.comm import Communicator
from hpcsgd.core.topology import form
from hpcsgd.methods import (
    Method,
    ad_psgd,
    async_sgd,
    bsp,
    d_psgd,
    delayed,
    hierarchical,
    sgp,
    ssp,
)
from references import batch, loss, model, vector

NEW: dict[str, Callable[[], Method]] = {
    "ad_psgd": ad_psgd,
    "async_sgd": async_sgd,
    "bsp": bsp,
    "d_psgd": d_psgd,
    "delayed": lambda: delayed(hierarchical(2), 1),
    "hierarchical": lambda: hierarchical(2),
    "sgp": sgp,
    "ssp": lambda: ssp(0),
    "ssp, not in step": lambda: ssp(2),
}


IN_STEP = [label for label in NEW if label not in {"ad_psgd", "async_sgd", "ssp, not in step"}]
"""Methods whose groups have made equally many steps when they load weights."""


def idle(
    world: Communicator, P: int, method: str, write: Callable[[nn.Module], None]
) -> tuple[Tensor, Tensor]:
    """Make steps with zero gradients and call `write` after one of them.

    Returns:
        The initial model, and the model averaged over all groups at the end.
    """
    net = model()
    inner = optim.SGD(net.parameters(), lr=0.1)
    optimizer = hpcsgd.DistributedOptimizer(inner, net, form(world, P), NEW[method]())
    start = vector(net)
    for t in range(6):
        for p in net.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        if t == 2:
            write(net)
    with optimizer.averaged_model():
        return start, vector(net)


@pytest.mark.threads(unless={"K": 2, "method": {"ad_psgd", "async_sgd", "ssp"}})
@pytest.mark.parametrize(("P", "K"), [(2, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize("method", NEW)
def test_what_is_added_counts(run, method: str, P: int, K: int) -> None:
    """The addition counts once, however fast each group is."""

    @torch.no_grad()
    def write(net: nn.Module) -> None:
        for p in net.parameters():
            p.add_(1.0)

    for start, end in run(P * K, idle, P, method, write):
        torch.testing.assert_close(end, start + 1, rtol=0, atol=1e-13)


@pytest.mark.threads(unless={"K": 2, "method": "ssp"})
@pytest.mark.parametrize(("P", "K"), [(2, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize("method", IN_STEP)
def test_loaded_weights_are_trained_on(run, method: str, P: int, K: int) -> None:
    loaded = model(seed=5)

    def write(net: nn.Module) -> None:
        net.load_state_dict(loaded.state_dict())

    for _, end in run(P * K, idle, P, method, write):
        torch.testing.assert_close(end, vector(loaded), rtol=0, atol=1e-13)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("method", NEW)
def test_clamped_weights_stay_clamped(run, method: str) -> None:
    """As in a Wasserstein GAN, weights exceed the bound by no more than the steps since the last clamp.

    The ranks wait for each other before each step, so an asynchronous method is behind by at most two steps.
    Even so, both groups may take off what one of them should have. The first clamp takes off 1.2. The excess
    at the other end then decreases by 0.2 per step, so 12 steps are enough.
    """
    most, lr = 0.2, 0.01

    def one(world: Communicator) -> float:
        net = model()
        inner = optim.SGD(net.parameters(), lr=lr)
        optimizer = hpcsgd.DistributedOptimizer(inner, net, form(world, 2), NEW[method]())
        found = 0.0
        for t in range(12):
            optimizer.zero_grad()
            loss(net, *batch(t, world.rank)).backward()
            optimizer.clip_grad_norm_(1.0)
            world.barrier()
            optimizer.step()
            found = vector(net).abs().max().item()
            with torch.no_grad():
                for p in net.parameters():
                    p.clamp_(-most, most)
        return found

    assert all(found <= most + 4 * lr for found in run(2, one))
