"""DEFT when each layer has a gradient on one worker only: all of it is sent, and nothing is lost."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn, optim

import hpcsgd
from hpcsgd.comm import Communicator
from hpcsgd.core.topology import form
from hpcsgd.methods import bsp
from hpcsgd.parts.grad_reduces import Sparse
from hpcsgd.parts.sparsifiers import Deft
from references import vector
from shapes import some

SIZES = (8, 16, 24, 5, 3, 40)
DENSITY = 0.2
EXACT = pytest.mark.parametrize("exact", [False, True])


def gradients(n: int) -> Tensor:
    """Return gradients (n, M), equal in every step; layer i is nonzero only for worker i mod n."""
    whole = 1 + torch.rand(sum(SIZES), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    layer = torch.repeat_interleave(torch.tensor(SIZES))
    return whole * (layer % n == torch.arange(n).view(-1, 1))


class Training:
    """One rank of a training at a learning rate of 1, so that parameters move by what is sent."""

    def __init__(self, world: Communicator, P: int, exact: bool) -> None:
        parts = [nn.Parameter(torch.zeros(size, dtype=torch.float64)) for size in SIZES]
        self.net, self.g = nn.ParameterList(parts), gradients(world.size)[world.rank].split(SIZES)
        method = bsp(Sparse(Deft(DENSITY, exact=exact)))
        inner = optim.SGD(self.net.parameters(), lr=1.0)
        self.optimizer = hpcsgd.DistributedOptimizer(inner, self.net, form(world, groups=P), method)

    def step(self) -> float:
        """Make a step, and return ‖e‖ after it."""
        self.optimizer.zero_grad()
        torch.stack([p @ g for p, g in zip(self.net.parameters(), self.g, strict=True)]).sum().backward()
        self.optimizer.step()
        return self.optimizer.metrics["error"]

    def state(self) -> tuple[dict, dict]:
        return copy.deepcopy((self.optimizer.state_dict(), self.net.state_dict()))


@pytest.mark.slow
@pytest.mark.threads(unless={"P": 1, "K": 2})
@EXACT
@pytest.mark.parametrize(("P", "K"), some([(1, 2), (1, 4), (2, 2)], {(1, 2), (2, 2)}))
def test_every_element_gets_its_update(run, P: int, K: int, exact: bool) -> None:
    n = P * K
    waits = round(n * n / DENSITY)
    steps = 3 * waits

    def training(world: Communicator) -> tuple[Tensor, list[float]]:
        one = Training(world, P, exact)
        errors = [one.step() for _ in range(steps)]
        return -vector(one.net), errors

    mean = gradients(n).mean(0)
    for sent, errors in run(n, training):
        assert (steps - sent / mean).max() <= waits, "steps whose gradient has not been sent"
        assert max(errors[-waits:]) <= 1.2 * max(errors[:waits]), "‖e‖ grows"


@pytest.mark.threads(unless={"n": 2})
@EXACT
@pytest.mark.parametrize("n", [2, 4])
def test_goes_on_in_mid_rotation(run, n: int, exact: bool) -> None:
    """The state after any step of a rotation gives the same bits."""

    def training(world: Communicator) -> list[Tensor]:
        one, ends = Training(world, 1, exact), []
        states = [one.state()]
        for _ in range(n * n + 1):
            one.step()
            states.append(one.state())
        for optimizer, net in states[:-1]:
            another = Training(world, 1, exact)
            another.net.load_state_dict(net)
            another.optimizer.load_state_dict(optimizer)
            while len(states) - 1 > another.optimizer.method.states()["grad_reduce"].replicated["t"]:
                another.step()
            ends.append(vector(another.net))
        return [vector(one.net), *ends]

    for whole, *resumed in run(n, training):
        assert all(torch.equal(whole, each) for each in resumed)
