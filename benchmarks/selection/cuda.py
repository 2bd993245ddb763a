"""The k elements of largest magnitude on a GPU: our kernel against torch.topk and a copy of the array.

    python benchmarks/selection.py --cuda [--quick] [--json FILE]

Seconds are those of the device, between two events, for several calls one after the other. Before the first
event the device is given other work, so that it does not wait for the host in between. The copy is from
device memory to device memory, and it reads and writes the array. If our kernel takes no longer, it reaches
half of the memory's bandwidth. "by layers" is 161 segments in one call, as many as ResNet-50 has, each with
its own k.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness import Contestant, Goal, Run, Spread, WallClock, interleaved, print_table, ratios
from harness.timing import Clock
from hpcsgd import kernels
from hpcsgd.comm.streams import on_accelerator, settle

OURS, COPY, TOPK, LAYERS = "hpcsgd", "copy", "torch.topk", "hpcsgd, by layers"
OVER = {TOPK: 1 / 5, COPY: 1.0}
"""Goals: ratios of the device's seconds."""
N = 25_600_000
IN_MEMORY = 16_000_000
"""Number of elements from which on the goals hold, because smaller arrays fit into a cache."""
SHARES = (0.001, 0.01)
CALLS = 5
"""Number of calls between two events."""
AHEAD, MOST_AHEAD = 40, 640
"""Numbers of copies that keep the device busy while the host puts a contestant's calls into the stream."""


class DeviceClock:
    """The clock of the device, which is kept busy until it gets what is timed, longer if the host is slow."""

    def __init__(self, device: torch.device) -> None:
        self._ahead = AHEAD
        self._busy = torch.zeros(N, device=device)
        self._other = torch.empty_like(self._busy)

    def start(self) -> None:
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(self._ahead):
            self._other.copy_(self._busy)
        self._begin.record()

    def stop(self) -> float:
        if self._begin.query():  # the device waited for the host, and the time is the host's
            self._ahead = min(2 * self._ahead, MOST_AHEAD)
        self._end.record()
        self._end.synchronize()
        return self._begin.elapsed_time(self._end) / 1e3


def clock_of(device: torch.device) -> Clock:
    """Return the clock of the device if it has one, otherwise one of the host."""
    if device.type == "cuda":
        return DeviceClock(device)
    return WallClock(functools.partial(settle, device) if on_accelerator(device) else lambda: None)


def layers(n: int, count: int = 161) -> tuple[torch.Tensor, torch.Tensor]:
    """Return starts and stops of as many layers as ResNet-50 has, with sizes as varied, n elements in all."""
    sizes = np.geomspace(64, 2_400_000, count)
    bounds = (np.concatenate([[0], sizes.cumsum() / sizes.sum()]) * n).astype(np.int64)
    return torch.from_numpy(bounds[:-1].copy()), torch.from_numpy(bounds[1:].copy())


def measured(x: torch.Tensor, elements: str, share: float, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each contestant; ratios are our time over its time in the same rounds."""
    n, k = len(x), int(len(x) * share)
    whole = (torch.tensor([0]), torch.tensor([n]), torch.tensor([k]))
    starts, stops = layers(n)
    counts = ((stops - starts) * share).ceil().long()
    chosen = x[kernels.largest(x, *whole)].abs().sort().values
    assert torch.equal(chosen, torch.topk(x.abs(), k, sorted=False).values.sort().values)
    other = torch.empty_like(x)
    calls = {
        OURS: lambda: kernels.largest(x, *whole),
        LAYERS: lambda: kernels.largest(x, starts, stops, counts),
        COPY: lambda: other.copy_(x),
        TOPK: lambda: torch.topk(x.abs(), k, sorted=False),
    }
    contestants = {who: Contestant(call, CALLS) for who, call in calls.items()}
    blocks = interleaved(contestants, rounds=rounds, clock=clock_of(x.device))
    rows = []
    for who, block in blocks.items():
        row = {"n": n, "k": k, "share": share, "elements": elements, "who": who}
        over = {} if who == OURS else {"ours_over": asdict(ratios(blocks[OURS].wall, block.wall))}
        rows.append(row | {"seconds": asdict(Spread.of(block.wall))} | over)
    return rows


def goals(rows: list[dict[str, Any]]) -> list[Goal]:
    return [
        Goal(
            f"{row['n']:,} {row['elements']}, {row['share']:.1%}: ours over {row['who']}",
            row["ours_over"]["median"],
            OVER[row["who"]],
        )
        for row in rows
        if row["who"] in OVER and row["n"] >= IN_MEMORY
    ]


def cells(row: dict[str, Any]) -> list[object]:
    seconds, over = row["seconds"]["median"], row.get("ours_over")
    moved = 4 * row["n"] * (2 if row["who"] == COPY else 1)
    ratio = f"{over['median']:.3f} ({over['low']:.3f}–{over['high']:.3f})" if over else ""
    values = [f"{row['n']:,}", row["elements"], f"{row['share']:.1%}", row["who"]]
    return [*values, f"{1e6 * seconds:.1f}", f"{moved / seconds / 1e9:.0f}", ratio]


HEAD = ["n", "elements", "k", "who", "µs", "GB/s", "ours over it (quartiles)"]


def fewer(rounds: int, n: int) -> int:
    """Return how many rounds of n elements take no longer than `rounds` rounds of N, but at least 3."""
    return max(min(rounds, rounds * N // n), min(rounds, 3))


def rows_of(device: torch.device, sizes: Sequence[int], rounds: int, quick: bool) -> list[dict[str, Any]]:
    """Return the rows for all sizes, kinds of elements and shares."""
    rows: list[dict[str, Any]] = []
    for n in sizes:
        generator = torch.Generator(device).manual_seed(0)
        normal = torch.randn(n, device=device, generator=generator)
        arrays = {"normal": normal} if quick else {"normal": normal, "heavy-tailed": normal**5}
        for elements, x in arrays.items():
            for share in SHARES:
                rows += measured(x, elements, share, fewer(rounds, n))
    return rows


def measure(quick: bool, file: Path | None) -> None:
    """Measure on a GPU. Raises `SystemExit` if there is no GPU or no library for it."""
    if not torch.cuda.is_available():
        raise SystemExit("no GPU here: nothing was measured")
    device = torch.device("cuda", torch.cuda.current_device())
    library = kernels.cuda(device)
    if library is None:
        raise SystemExit("no CUDA kernels to measure: pip install -e . where there is nvcc")
    run = Run()
    rows = rows_of(device, [N], 5 if quick else 30, quick)
    name = torch.cuda.get_device_name(device)
    print(f"{library}, {name}")
    print_table(map(cells, rows), HEAD)
    run.conclude(rows, goals(rows), file, {"kernels": str(library), "gpu": name})
