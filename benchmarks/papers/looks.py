"""What a single rank can show: gradients, curvature, and the cost of large batches and of partitions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn, optim
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy

from density.tasks import Samples
from harness import Contestant, Spread, interleaved
from hpcsgd.data import DefDP, Partition, SelDP
from hpcsgd.data.partition import Samples as PartitionSamples
from hpcsgd.methods.selsync import RelativeChange
from hpcsgd.models import cifar_resnet, cnn
from papers.artifact import Place, Row
from papers.on_ranks import MILESTONES, SEED, loaded

BATCHES = (16, 32, 64, 128, 256, 512)
SETS = {"CIFAR, 50,000": 50_000, "ImageNet, 1.28 million": 1_281_167}
WINDOWS = (25, 50, 100, 200)
BATCH = 32
POWER = 12
"""Number of steps of the power iteration."""


def by_batch(place: Place) -> list[Row]:
    """Return the seconds of a step of ResNet-8, and the bytes kept for the backward pass, by batch size."""
    torch.set_num_threads(1)
    sizes = BATCHES[:3] if place.quick else BATCHES
    steps = {b: partial(_step, cifar_resnet(8), torch.randn(b, 3, 32, 32)) for b in sizes}
    contestants = {str(b): Contestant(step, warm_up=1) for b, step in steps.items()}
    blocks = interleaved(contestants, rounds=2 if place.quick else 9)
    return [
        {"batch": b, "seconds": Spread.of(blocks[str(b)].wall).median, "bytes": _kept(steps[b])}
        for b in sizes
    ]


def _step(model: nn.Module, x: Tensor) -> None:
    cross_entropy(model(x), torch.zeros(len(x), dtype=torch.int64)).backward()


def _kept(step: partial[None]) -> int:
    """Return the bytes that the forward pass keeps; each storage counts once."""
    found: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with saved_tensors_hooks(keep, lambda x: x):
        step()
    return sum(found.values())


def gradients(place: Place) -> list[Row]:
    """Run one training, and return a row for every 25 steps (10 in a quick run).

    A row has these values:

    - quantiles of the first layer's gradient,
    - means of the gradient's squared norm and of Δ over the steps since the previous row,
    - the largest eigenvalue of the Hessian on one batch,
    - the test accuracy.
    """
    torch.set_num_threads(1)
    samples = loaded(place, 3200)
    steps, every = (40, 10) if place.quick else (1500, 25)
    torch.manual_seed(SEED)
    model = cnn(tuple(samples.x.shape[1:]), widths=(8, 16))
    optimizer = optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    schedule = optim.lr_scheduler.MultiStepLR(optimizer, [int(part * steps) for part in MILESTONES])
    change, rows, norms, changes = RelativeChange(25, 0.16), [], [], []
    for step, mine in enumerate(_order(samples, steps), 1):
        optimizer.zero_grad()
        cross_entropy(model(samples.x[mine]), samples.y[mine]).backward()
        squared = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)
        norms.append(squared)
        changes.append(float(change(torch.tensor([squared], dtype=torch.float64))))
        if step % every == 0:
            rows.append({"step": step, **_look(model, samples), "norm": float(np.mean(norms)),
                         "delta": float(np.mean(changes[1 if step == every else 0:]))})  # fmt: skip
            norms.clear()
            changes.clear()
        optimizer.step()
        schedule.step()
    return rows


def _order(samples: Samples, steps: int) -> Iterator[Tensor]:
    chance = torch.Generator().manual_seed(SEED)
    while True:
        for rows in torch.randperm(len(samples.x), generator=chance).split(BATCH):
            if steps == 0:
                return
            steps -= 1
            yield rows


def _look(model: nn.Module, samples: Samples) -> dict[str, Any]:
    first = next(iter(model.parameters()))
    assert first.grad is not None
    quantiles = first.grad.flatten().quantile(torch.linspace(0.01, 0.99, 21)).tolist()
    found = {"quantiles": quantiles, "eigenvalue": _curvature(model, samples.x[:256], samples.y[:256])}
    with torch.no_grad():
        model.eval()
        found["accuracy"] = float((model(samples.test_x).argmax(1) == samples.test_y).float().mean())
        model.train()
    return found


def _curvature(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the largest eigenvalue of the Hessian, by power iteration with Hessian-vector products."""
    parameters = list(model.parameters())
    slopes = torch.autograd.grad(cross_entropy(model(x), y), parameters, create_graph=True)
    chance = torch.Generator().manual_seed(SEED)
    v = [torch.randn(p.shape, generator=chance) for p in parameters]
    value = 0.0
    for _ in range(POWER):
        norm = float(torch.stack([a.square().sum() for a in v]).sum().sqrt())
        v = [a / norm for a in v]
        product = torch.autograd.grad(slopes, parameters, v, retain_graph=True)
        value = float(torch.stack([(a * b).sum() for a, b in zip(v, product, strict=True)]).sum())
        v = [a.detach() for a in product]
    return value


def dealing(place: Place) -> list[Row]:
    """Return the seconds of assigning an epoch's samples to one of 16 workers, and of Δ by window."""
    partitions: dict[str, Partition] = {"SelDP": SelDP(), "DefDP": DefDP()}
    sets = dict(list(SETS.items())[:1]) if place.quick else SETS
    deals = {(who, name): partial(each.assign, PartitionSamples(n, 16, SEED), 3, 1)
             for name, n in sets.items() for who, each in partitions.items()}  # fmt: skip
    changes = {("Δ", f"window {window}"): partial(_filled(window), torch.ones(16, dtype=torch.float64))
               for window in WINDOWS}  # fmt: skip
    # Time Δ separately: after the large partitions, the caches would be cold.
    return [row for runs in (deals, changes) for row in _in_turn(runs, 3 if place.quick else 15)]


def _in_turn(runs: Mapping[tuple[str, str], Callable[[], object]], rounds: int) -> list[Row]:
    blocks = interleaved({", ".join(name): Contestant(run) for name, run in runs.items()}, rounds=rounds)
    return [
        {"who": who, "what": what, "seconds": Spread.of(blocks[f"{who}, {what}"].wall).median}
        for who, what in runs
    ]


def _filled(window: int) -> RelativeChange:
    change = RelativeChange(window, 0.16)
    for _ in range(window):
        change(torch.rand(16, dtype=torch.float64))
    return change
