"""On a device the bits are those of the host, and the host never waits for work that was just enqueued."""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn, optim

from far.ranks import PATTERNS, slowed
from hpcsgd import NaturalGradient

pytestmark = pytest.mark.usefixtures("far_device")

DEVICE = "far:0"
LAYERS = (5, 6, 4, 3)


class Training:
    def __init__(self, device: str) -> None:
        generator = torch.Generator().manual_seed(1)
        self.net = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(LAYERS)))
        for p in self.net.parameters():
            p.data.copy_(torch.randn(p.shape, generator=generator))
        self.net.to(device)
        self.optimizer = NaturalGradient(optim.SGD(self.net.parameters(), lr=0.01), self.net, rank=2)
        self.x = [torch.randn(8, LAYERS[0], generator=generator).to(device) for _ in range(15)]

    def loss(self, t: int) -> Tensor:
        self.optimizer.zero_grad()
        return self.net(self.x[t]).square().mean()

    def steps(self, count: int) -> list[Tensor]:
        for t in range(count):
            self.loss(t).backward()
            self.optimizer.step()
        sides = (side for layer in self.optimizer.layers for side in (layer.inputs, layer.outputs))
        estimates = (side.F for side in sides)
        parts = [x for F in estimates if F is not None for x in (F.R, F.eigenvalues)]
        return [x.detach().cpu() for x in (*self.net.parameters(), *parts)]


@pytest.mark.slow
@pytest.mark.parametrize("slow", ["none", "default stream slow"])
def test_the_bits_are_those_of_the_host(slow: str) -> None:
    expected = Training("cpu").steps(15)
    with slowed(torch.device(DEVICE), {stream: us // 10 for stream, us in PATTERNS[slow].items()}):
        found = Training(DEVICE).steps(15)
    assert len(found) == len(expected) == 18
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.isfinite().all()
        assert torch.equal(mine, theirs)


def test_a_step_waits_once_and_for_the_one_before() -> None:
    """A whole step can be enqueued while the device does nothing; the host waits only for the step before."""
    training = Training(DEVICE)
    training.steps(2)
    for t in (2, 3):
        torch.accelerator.synchronize()
        torch.ops.far.forget_waits()
        torch.ops.far.hold(0, 0, True)
        hopeless = threading.Timer(20.0, torch.ops.far.hold, (0, 0, False))
        hopeless.start()
        training.loss(t).backward()
        training.optimizer.step()
        in_time = hopeless.is_alive()
        hopeless.cancel()
        torch.ops.far.hold(0, 0, False)
        assert in_time
        assert torch.ops.far.waits(0) == ([] if t == 2 else ["event"])
