"""One training of `bytes_at_quality.py` by the library; the groups are threads of one process."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR

import hpcsgd
from bytes_at_quality.contestants import CONTESTANTS, Settings
from harness import WallClock
from hpcsgd.comm import Communicator, threads
from hpcsgd.core.layout import bucket_bytes, nbytes
from hpcsgd.core.topology import form
from hpcsgd.core.traffic import ModelLayout
from hpcsgd.cost.collectives import sent
from hpcsgd.cost.traffic import of_step
from hpcsgd.data import Windows
from hpcsgd.engine.plan import StepPlan
from hpcsgd.models import gpt
from hpcsgd.train.process import keep_freed_memory
from late_accuracy.training import rate

AT_ONCE = 64
"""Number of windows evaluated at once."""
TIMEOUT = 3600.0


@dataclass(frozen=True)
class Setting:
    """The settings that all trainings have in common."""

    width: int = 64
    layers: int = 2
    heads: int = 4
    window: int = 128
    """Length of a window in tokens, which are bytes."""
    batch: int = 8
    """Number of windows in a step of all groups together."""
    steps: int = 4096
    trials: int = 4
    """Number of settings that are tried for each contestant."""
    judged: int = 1024
    """Number of windows to judge by: at the end of the training text for trials, and of the test split."""


FULL = Setting()
QUICK = Setting(width=16, layers=1, heads=2, window=32, batch=8, steps=192, trials=1, judged=64)


@dataclass(frozen=True)
class Text:
    """Windows, as int64 [·, window]; y has the token that follows each one of x."""

    x: Tensor
    y: Tensor
    held_out: slice
    test_x: Tensor
    test_y: Tensor


def read(path: Path, setting: Setting) -> Text:
    train, test = (Windows(path, split, setting.window, "bytes") for split in ("train", "test"))
    count, judged = len(train) - setting.judged, setting.judged
    x, y = _windows(train, [*range(min(count, setting.batch * setting.steps)), *range(count, len(train))])
    return Text(x, y, slice(len(x) - judged, None), *_windows(test, range(judged)))


def _windows(data: Windows, rows: Any) -> tuple[Tensor, Tensor]:
    [[x, y]] = [data.collate(data.__getitems__(list(rows)))]
    return x, y


def start_of(setting: Setting, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return gpt(256, width=setting.width, layers=setting.layers, heads=setting.heads)


def measure(
    setting: Setting, text: Text, who: str, groups: int, tried: Settings, seed: int
) -> dict[str, Any]:
    """Return a row: the quality of the mean of the groups at the end, and what each of them sent."""
    clock = WallClock()
    torch.set_num_threads(1)
    keep_freed_memory()
    start = start_of(setting, seed)
    found = threads.run(groups, train, setting, text, start, who, tried, seed, timeout=TIMEOUT)
    means = {name: mean(each[name] for each in found) for name in found[0]}
    return {
        "who": who, "groups": groups, "seed": seed, "settings": dict(tried), "setting": asdict(setting),
        "parameters": sum(p.numel() for p in start.parameters()), **means,
        "formula": predicted(setting, start, who, groups, tried), "seconds": round(clock.stop(), 1),
    }  # fmt: skip


def train(
    world: Communicator, setting: Setting, text: Text, start: nn.Module, who: str, tried: Settings, seed: int
) -> dict[str, float]:
    """Train as one of the groups, and return the bytes sent and the losses, in nats per token.

    The losses are those of the mean of all groups, on this group's share of the windows to judge by.
    """
    contestant, model = CONTESTANTS[who], copy.deepcopy(start)
    topology, method = form(world, groups=world.size), contestant.method(tried, world.size, setting.steps)
    optimizer = hpcsgd.DistributedOptimizer(contestant.optimizer(model, tried), model, topology, method)
    schedule = LambdaLR(optimizer, lambda t: rate((t + 1) / setting.steps))
    before = world.stats.totals()
    for mine in batches(setting, text, seed)[:, world.rank :: world.size]:
        optimizer.zero_grad()
        loss_of(model, text.x[mine], text.y[mine]).backward()
        optimizer.step()
        schedule.step()
    optimizer.method.state_dict()  # waits for pending averages
    spent = sum(total.bytes for total in world.stats.since(before).values())
    share = slice(world.rank, None, world.size)
    with optimizer.averaged_model():
        held_out = judge(model, text.x[text.held_out][share], text.y[text.held_out][share])
        test = judge(model, text.test_x[share], text.test_y[share])
    return {"bytes": spent, "held_out_loss": held_out, "test_loss": test}


def batches(setting: Setting, text: Text, seed: int) -> Tensor:
    """Return rows of windows, [steps, batch], the same for any number of groups.

    Each window is used at most once while there are enough.
    """
    chance, count = torch.Generator().manual_seed(seed), text.held_out.start
    wanted = setting.steps * setting.batch
    passes = [torch.randperm(count, generator=chance) for _ in range(-(-wanted // count))]
    return torch.cat(passes)[:wanted].view(setting.steps, setting.batch)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(model(x).flatten(0, 1), y.flatten())


@torch.no_grad()
def judge(model: nn.Module, x: Tensor, y: Tensor) -> float:
    parts = zip(x.split(AT_ONCE), y.split(AT_ONCE), strict=True)
    return sum(loss_of(model, some, asked).item() * len(some) for some, asked in parts) / len(x)


def predicted(setting: Setting, model: nn.Module, who: str, groups: int, tried: Settings) -> float:
    """Return the bytes that a rank sends, by the formulas of its method."""
    m = ModelLayout.of(model.named_parameters(), groups, 1, bucket_bytes(nbytes(model.parameters())))
    plan = StepPlan.of(CONTESTANTS[who].method(tried, groups, setting.steps))
    return sum(
        count * x.times * float(sent(x.operation, x.nbytes, m.ranks(x.over)))
        for stage, count in plan.of_run(setting.steps)
        for x in of_step(stage, m)
    )
