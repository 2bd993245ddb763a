"""One training of `guard.py` by the library; the groups are threads of one process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn.functional import cross_entropy

import hpcsgd
from density.tasks import Samples, images
from harness import WallClock
from hpcsgd.comm import Communicator, threads
from hpcsgd.core.topology import form
from hpcsgd.data import convert

GROUPS, NOISY = 4, 1
"""Number of groups of one rank, and the index of the group whose data are noise."""
EVERY = 4
BATCH = 32
LAST = 10
"""Number of synchronizations over which the loss is averaged."""
TIMEOUT = 600.0
WITHOUT, PLAIN, GUARDED = "without the group", "plain mean", "guarded"
CASES = (WITHOUT, PLAIN, GUARDED)
Guard = hpcsgd.PseudoGradientPenalty | None


@dataclass(frozen=True)
class Setting:
    """The length of a training, and the first step of the noise."""

    steps: int = 600
    noise_from: int = 200


FULL = Setting()
QUICK = Setting(steps=200, noise_from=100)


def diloco(momentum: float, guard: Guard) -> hpcsgd.Method:
    outer = partial(optim.SGD, lr=0.7, momentum=momentum, nesterov=True)
    return hpcsgd.diloco(EVERY, outer, guard=guard)


METHODS: Mapping[str, Callable[[Guard], hpcsgd.Method]] = {
    "hierarchical": lambda guard: hpcsgd.hierarchical(EVERY, guard=guard),
    "diloco, momentum 0.5": partial(diloco, 0.5),
    "diloco, momentum 0.9": partial(diloco, 0.9),
    "delayed": lambda guard: hpcsgd.delayed(hpcsgd.hierarchical(EVERY, guard=guard), 2),
    "streaming": lambda guard: hpcsgd.streaming(hpcsgd.diloco(EVERY, guard=guard), 2, 1),
}
"""The methods, each made with its guard."""


def digits() -> Samples:
    """Return handwritten digits, 8 × 8 pixels of 0 to 1."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "digits.h5"
        convert("digits", None, store)
        return images(store, 1 << 20)


def network(seed: int, inputs: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, 10))


def measure(setting: Setting, samples: Samples, who: str, case: str, seed: int) -> dict[str, Any]:
    """Return a row: the loss of the common model after the last synchronizations."""
    clock = WallClock()
    torch.set_num_threads(1)
    start = network(seed, samples.x[0].numel()).state_dict()
    groups = GROUPS - (case == WITHOUT)
    found = threads.run(groups, train, setting, samples, start, who, case, seed, timeout=TIMEOUT)
    return {
        "who": who, "case": case, "seed": seed, "steps": setting.steps, "noise_from": setting.noise_from,
        **found[0], "seconds": round(clock.stop(), 1),
    }  # fmt: skip


def train(
    world: Communicator, setting: Setting, samples: Samples, start: Any, who: str, case: str, seed: int
) -> dict[str, float]:
    """Train as one of the groups; return the loss, and how often groups were left out."""
    group = world.rank if case != WITHOUT else world.rank + (world.rank >= NOISY)
    chance = torch.Generator().manual_seed(GROUPS * seed + group)
    model, losses, out = network(seed, samples.x[0].numel()), list[float](), 0.0
    model.load_state_dict(start)
    guard = hpcsgd.PseudoGradientPenalty() if case == GUARDED else None
    optimizer = hpcsgd.DistributedOptimizer(
        optim.SGD(model.parameters(), lr=0.1), model, form(world, world.size), METHODS[who](guard)
    )
    for t in range(1, setting.steps + 1):
        noise = group == NOISY and t > setting.noise_from
        optimizer.zero_grad()
        loss_of(model, *batch(samples, chance, noise=noise)).backward()
        optimizer.step()
        out += optimizer.metrics.get("groups_left_out", 0.0)
        if t > setting.steps - LAST * EVERY and t % EVERY == 0:
            with torch.no_grad():
                losses.append(loss_of(model, samples.test_x, samples.test_y).item())
    return {"test_loss": fmean(losses), "left_out": out}


def batch(samples: Samples, chance: torch.Generator, *, noise: bool) -> tuple[Tensor, Tensor]:
    """Return a batch of the group's data; with `noise`, random pixels with random labels."""
    drawn = torch.randint(len(samples.y), (BATCH,), generator=chance)
    x, y = samples.x[drawn], samples.y[drawn]
    if noise:
        return 3 * torch.randn(x.shape, generator=chance), torch.randint(0, 10, y.shape, generator=chance)
    return x, y


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(model(x), y)
