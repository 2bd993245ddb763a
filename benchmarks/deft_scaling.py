"""Scaling of DEFT's selection: the slowest of n workers against Top-k, with our kernel and with torch.topk.

    python benchmarks/deft_scaling.py [--quick] [--json FILE] [--plot FILE]

Everything runs on one thread. The layers are those of ResNet-18, of an LSTM on WikiText-2's vocabulary, and
of NeuMF on MovieLens-20M's users and items. Elements are drawn from a normal distribution, scaled to the norm
that each layer had in a gradient of random data. Workers and Top-k take turns in one process. Between the
turns the caches are filled with other data. The time of DEFT is the median of the slowest worker. Top-k and
CLT-k search the whole vector, however many workers there are.

"planning" is the time to share k out over layers and layers over workers (algorithms 3 and 4, in every step);
the partition (algorithm 2) is made once. "theory" is n·log k/(log k − log n), eq. 8 of DEFT's paper.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from harness import Contestant, Goal, Run, Spread, interleaved, print_table
from hpcsgd import kernels
from hpcsgd.files.pictures import BLUE, GREEN, GREY, ORANGE, STYLE, save
from hpcsgd.models import lstm, ncf, resnet18
from hpcsgd.parts.sparsifiers import Accumulated
from hpcsgd.parts.sparsifiers.base import wanted
from hpcsgd.parts.sparsifiers.deft import partition, share_out

WORKERS = (1, 2, 4, 8, 16, 32, 64)
LINEAR_UP_TO = 32
PLANNING_AT, PLANNING = 16, 0.05
"""Goals: a speed-up at least linear up to so many workers, and planning at most this share of the selection.
"""
TOKENS, USERS, ITEMS = 33_278, 138_493, 26_744


def of_images() -> Tensor:
    scores = (net := resnet18())(torch.randn(4, 3, 32, 32))
    return backwards(net, cross_entropy(scores, torch.arange(4)))


def of_tokens() -> Tensor:
    net, x = lstm(TOKENS), torch.randint(TOKENS, (4, 35))
    return backwards(net, cross_entropy(net(x).flatten(0, 1), x.flatten()))


def of_ratings() -> Tensor:
    net = ncf(USERS, ITEMS)
    x = torch.stack([torch.randint(USERS, (512,)), torch.randint(ITEMS, (512,))], 1)
    scores = net(x)
    return backwards(net, scores.square().mean())


def backwards(net: nn.Module, loss: Tensor) -> Tensor:
    """Return the norms of the layers, the last layer first, and their sizes, as a tensor of shape (2, L)."""
    loss.backward()
    layers = [p.grad for p in reversed(list(net.parameters())) if p.grad is not None]
    norms, sizes = [g.norm().item() for g in layers], [g.numel() for g in layers]
    return torch.tensor([norms, sizes], dtype=torch.float64)


@dataclass(frozen=True)
class Task:
    name: str
    layers: Callable[[], Tensor]
    density: float


TASKS = (Task("ResNet-18", of_images, 0.01), Task("LSTM", of_tokens, 0.001), Task("NeuMF", of_ratings, 0.1))


def accumulated(layers: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return acc and the bounds of its layers."""
    sizes = layers[1].long()
    acc = torch.randn(int(sizes.sum()), generator=generator)
    for part, norm in zip(acc.split(sizes.tolist()), layers[0].tolist(), strict=True):
        part.mul_(norm / part.norm())
    return acc, torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])


def by_kernel(acc: Tensor, starts: Tensor, stops: Tensor, k: Tensor) -> None:
    kernels.largest(acc, starts, stops, k)


def by_topk(acc: Tensor, starts: Tensor, stops: Tensor, k: Tensor) -> None:
    for start, stop, each in zip(starts.tolist(), stops.tolist(), k.tolist(), strict=True):
        if each:
            torch.topk(acc[start:stop].abs(), each, sorted=False)


SELECT = {"kernel": by_kernel, "torch.topk": by_topk}
TOPK, PLANNING_OF, PARTITION = "Top-k", "planning", "partition"
_ELSEWHERE = torch.ones(32 << 20)


def seconds(runs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each run, with cold caches."""

    def forget() -> None:
        _ELSEWHERE.add_(1)

    contestants = {name: Contestant(run, settle=forget) for name, run in runs.items()}
    blocks = interleaved(contestants, rounds=rounds)
    return {name: Spread.of(times.wall).median for name, times in blocks.items()}


def measured(task: Task, workers: Sequence[int], rounds: int, slow_rounds: int) -> Iterable[dict[str, Any]]:
    acc, layers = accumulated(task.layers(), torch.Generator().manual_seed(0))
    k = wanted(task.density, len(acc))
    whole = (torch.tensor([0]), torch.tensor([len(acc)]), torch.tensor([k]))
    counts = {"kernel": rounds, "torch.topk": slow_rounds}
    for n in workers:
        bounds = partition(layers, n)
        norms = kernels.accumulate(acc, torch.zeros_like(acc), bounds)
        x = Accumulated(acc, bounds, norms)
        ks, bins = share_out(x, k, 0, n)
        bins_of = [torch.nonzero(bins == worker).view(-1) for worker in range(n)]
        shares = [(bounds[mine], bounds[mine + 1], ks[mine]) for mine in bins_of]
        before = {PLANNING_OF: partial(share_out, x, k, 0, n), PARTITION: partial(partition, layers, n)}
        once = seconds(before, 5 * rounds)
        for name, run in SELECT.items():
            turns = {f"worker {worker}": partial(run, acc, *share) for worker, share in enumerate(shares)}
            found = seconds({TOPK: partial(run, acc, *whole), **turns}, counts[name])
            slowest = max(found[worker] for worker in turns)
            yield {
                "task": task.name, "M": len(acc), "layers": len(layers) - 1, "density": task.density, "n": n,
                "pieces": len(norms), "select": name, "topk_seconds": found[TOPK], "deft_seconds": slowest,
                "speed_up": found[TOPK] / slowest, "theory": theory(n, k),
                "planning_seconds": once[PLANNING_OF], "planning_share": once[PLANNING_OF] / slowest,
                "partition_seconds": once[PARTITION],
            }  # fmt: skip


def theory(n: int, k: int) -> float:
    return n * math.log(k) / (math.log(k) - math.log(n))


def goals(rows: Iterable[dict[str, Any]]) -> list[Goal]:
    found = []
    for row in rows:
        case = f"{row['task']}, {row['select']}, n = {row['n']}"
        if 1 < row["n"] <= LINEAR_UP_TO:
            found.append(Goal(f"{case}: n over the speed-up", row["n"] / row["speed_up"], 1))
        if row["n"] == PLANNING_AT:
            found.append(Goal(f"{case}: planning over selection", row["planning_share"], PLANNING))
    return found


HEAD = ["task", "d", "n", "pieces", "by", "Top-k ms", "DEFT ms", "speed-up", "theory", "planning µs", "share"]


def cells(row: dict[str, Any]) -> list[object]:
    return [
        *(row[key] for key in ("task", "density", "n", "pieces", "select")),
        f"{1e3 * row['topk_seconds']:.2f}", f"{1e3 * row['deft_seconds']:.3f}",
        f"{row['speed_up']:.1f}", f"{row['theory']:.1f}",
        f"{1e6 * row['planning_seconds']:.1f}", f"{row['planning_share']:.1%}",
    ]  # fmt: skip


def draw(rows: Sequence[dict[str, Any]], target: Path) -> None:
    with rc_context(STYLE):
        figure = Figure(figsize=(9, 4.4), dpi=120, layout="constrained")
        _draw(figure, rows)
        save(figure, target)


def _draw(figure: Figure, rows: Sequence[dict[str, Any]]) -> None:
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    for axes, task in zip(figure.subplots(1, len(tasks), sharey=True), tasks, strict=True):
        for name, colour in (("kernel", BLUE), ("torch.topk", ORANGE)):
            mine = [row for row in rows if row["task"] == task and row["select"] == name]
            workers = [r["n"] for r in mine]
            axes.plot(workers, [r["speed_up"] for r in mine], "o-", color=colour, label=name)
        axes.plot(workers, [r["theory"] for r in mine], "--", color=GREEN, label="theory")
        axes.plot(workers, workers, ":", color=GREY, label="linear")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_title(f"{task}, d = {mine[0]['density']:g}\n{mine[0]['M'] / 1e6:.1f} M parameters")
        axes.set_xlabel("workers")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
    figure.axes[0].set_ylabel("seconds of Top-k over those of DEFT")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize="small")


def main() -> None:
    parser = argparse.ArgumentParser(description="How DEFT's selection scales with workers.")
    parser.add_argument("--quick", action="store_true", help="take a minute: fewer workers and rounds")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    library = kernels.native()
    run = Run()
    workers, rounds, slow_rounds = (WORKERS[::2], 5, 1) if arguments.quick else (WORKERS, 21, 3)
    rows = [row for task in TASKS for row in measured(task, workers, rounds, slow_rounds)]
    print(library)
    print_table(map(cells, rows), HEAD)
    run.conclude(rows, goals(rows), arguments.json, {"kernels": str(library)})
    if arguments.plot:
        draw(rows, arguments.plot)


if __name__ == "__main__":
    main()
