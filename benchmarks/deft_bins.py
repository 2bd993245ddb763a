"""The effect of the partition of layers, and of their assignment to n workers, on DEFT's selection.

    python benchmarks/deft_bins.py [--quick] [--json FILE]

The tasks are those of deft_scaling.py with our kernel, whose time hardly depends on k, on one thread and with
cold caches. The time is that of the slowest of n workers. Pieces of layers are assigned to workers in four
ways:

    size·log k     by algorithms 2 and 4, as `hpcsgd.Deft` does
    measured       by the seconds that each piece alone took, minus those of a call
    half pieces    by size·log k again, with pieces of at most M/(2n) elements
    even           M/n elements each, cut where a bin is full, so at most n − 1 more pieces than layers

"elements" and "selected" are those of the slowest worker, divided by M/n and k/n. "loss" is n over the
speed-up relative to Top-k; it is 1 where the speed-up is linear. "without call" is the same without the time
of a call for one element. With cold caches, that call is most of what cannot be divided.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deft_scaling import LINEAR_UP_TO, TASKS, Task, accumulated, by_kernel, seconds
from harness import Goal, Run, print_table
from hpcsgd import kernels
from hpcsgd.parts.sparsifiers.base import wanted
from hpcsgd.parts.sparsifiers.deft import allocate, assign, partition

WORKERS = (4, 8, 16, 32)
DEFT, EVEN = "size·log k", "even"
TOPK, CALL = "Top-k", "one element"
NANO = 10**9
Row = dict[str, Any]


@dataclass(frozen=True)
class Assigned:
    """Pieces between neighboring `bounds`; worker `bins[i]` selects `k[i]` elements from piece i."""

    bounds: Tensor
    k: list[int]
    bins: list[int]

    def of(self, worker: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return starts, stops and k of the pieces that the worker searches."""
        mine = torch.tensor(
            [i for i, b in enumerate(self.bins) if b == worker and self.k[i]], dtype=torch.int64
        )
        return self.bounds[mine], self.bounds[mine + 1], torch.tensor(self.k)[mine]


def even(layers: Tensor, n: int) -> tuple[Tensor, list[int]]:
    """Return the bounds of pieces, and the bin of each; layers stay in order, cut where a bin is full."""
    M = int(layers[-1])
    ends = torch.tensor([M * (b + 1) // n for b in range(n)])
    bounds = torch.cat([layers, ends]).unique()
    return bounds, torch.searchsorted(ends, bounds[1:]).tolist()


def ways(acc: Tensor, layers: Tensor, k: int, n: int, rounds: int) -> Iterator[tuple[str, Assigned]]:
    bounds = partition(layers, n)
    ks = shares_of(acc, bounds, k)
    sizes = bounds.diff().tolist()
    yield DEFT, Assigned(bounds, ks, allocate(sizes, ks, n))
    costs = [round(NANO * cost) for cost in cost_of_each(acc, bounds, ks, rounds)]
    yield "measured", Assigned(bounds, ks, allocate(costs, [1] * len(costs), n))
    halves = partition(layers, 2 * n)
    ks = shares_of(acc, halves, k)
    yield "half pieces", Assigned(halves, ks, allocate(halves.diff().tolist(), ks, n))
    bounds, bins = even(layers, n)
    yield EVEN, Assigned(bounds, shares_of(acc, bounds, k), bins)


def shares_of(acc: Tensor, bounds: Tensor, k: int) -> list[int]:
    """Return the share of k of every piece, by its norm (algorithm 3)."""
    sizes = bounds.diff().tolist()
    return assign([float(part.norm()) for part in acc.split(sizes)], sizes, k)


def cost_of_each(acc: Tensor, bounds: Tensor, ks: Sequence[int], rounds: int) -> list[float]:
    """Return the seconds of selecting from each piece, without the call, or 0 where nothing is selected."""
    pieces = [(bounds[i : i + 1], bounds[i + 1 : i + 2], torch.tensor([k])) for i, k in enumerate(ks)]
    turns = {str(i): partial(by_kernel, acc, *piece) for i, piece in enumerate(pieces)}
    found = seconds({CALL: one_element(acc), **turns}, rounds)
    return [max(0.0, found[str(i)] - found[CALL]) if k else 0.0 for i, k in enumerate(ks)]


def one_element(acc: Tensor) -> Callable[[], None]:
    return partial(by_kernel, acc, torch.tensor([0]), torch.tensor([1]), torch.tensor([1]))


def measured(task: Task, workers: Sequence[int], rounds: int) -> Iterator[Row]:
    acc, layers = accumulated(task.layers(), torch.Generator().manual_seed(0))
    k = wanted(task.density, len(acc))
    whole = (torch.tensor([0]), torch.tensor([len(acc)]), torch.tensor([k]))
    for n in workers:
        assigned = dict(ways(acc, layers, k, n, rounds))
        shares = {(way, worker): each.of(worker) for way, each in assigned.items() for worker in range(n)}
        turns = {
            f"{way} {worker}": partial(by_kernel, acc, *share) for (way, worker), share in shares.items()
        }
        found = seconds({TOPK: partial(by_kernel, acc, *whole), CALL: one_element(acc), **turns}, rounds)
        topk, call = found[TOPK], found[CALL]
        for way, each in assigned.items():
            slowest = max(range(n), key=lambda worker: found[f"{way} {worker}"])
            starts, stops, ks = shares[way, slowest]
            took = found[f"{way} {slowest}"]
            yield {
                "task": task.name, "M": len(acc), "density": task.density, "n": n, "bins": way,
                "pieces": len(each.k), "elements": n * int((stops - starts).sum()) / len(acc),
                "selected": n * int(ks.sum()) / k, "seconds": took, "topk_seconds": topk,
                "call_seconds": call, "loss": n * took / topk,
                "loss_without_call": n * (took - call) / (topk - call),
            }  # fmt: skip


def goals(rows: Iterable[Row]) -> list[Goal]:
    return [
        Goal(f"{row['task']}, n = {row['n']}, {row['bins']}: n over the speed-up", row["loss"], 1)
        for row in rows
        if row["n"] <= LINEAR_UP_TO and row["bins"] in (DEFT, EVEN)
    ]


HEAD = ["task", "d", "n", "bins", "pieces", "elements", "selected", "ms", "loss", "without call"]


def cells(row: Row) -> list[object]:
    return [
        *(row[key] for key in ("task", "density", "n", "bins", "pieces")),
        f"{row['elements']:.2f}", f"{row['selected']:.2f}", f"{1e3 * row['seconds']:.3f}",
        f"{row['loss']:.2f}", f"{row['loss_without_call']:.2f}",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="take a minute: one task, fewer workers and rounds"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    run = Run()
    tasks, workers, rounds = (TASKS[:1], WORKERS[:2], 3) if given.quick else (TASKS, WORKERS, 11)
    rows = [row for task in tasks for row in measured(task, workers, rounds)]
    print_table(map(cells, rows), HEAD)
    run.conclude(rows, goals(rows), given.json, {"kernels": str(kernels.native())})


if __name__ == "__main__":
    main()
