"""The time to send through the host, relative to the bus: copies down and up, and an operation with both.

The speed of the bus is what a copy of pinned memory reaches. An operation of one rank has no partner: it
copies down, waits, and copies up again. If it takes as long as the two copies, staging adds nothing to the
time of the bus.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from harness import Contestant, Goal, Spread, WallClock, interleaved, ratios

DOWN, UP, STAGED = "down", "up", "staged allreduce of one rank"
OVER_BUS = 1.1
"""Goal: seconds of an operation, relative to those of its two copies."""
IN_LARGE = 16_000_000
"""Number of bytes from which on the goal holds; the time of a smaller operation is mostly that of its calls.
"""
HEAD = ["MB", "who", "ms", "GB/s", "over the bus (quartiles)"]


def calls(x: Tensor, allreduce: Callable[[Tensor], object]) -> Mapping[str, Callable[[], object]]:
    """Return the calls, each of which moves the same number of bytes."""
    pinned = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.device.type != "cpu")
    return {
        DOWN: lambda: pinned.copy_(x, non_blocking=True),
        UP: lambda: x.copy_(pinned, non_blocking=True),
        STAGED: lambda: allreduce(x),
    }


def rows_of(
    device: torch.device,
    sizes: tuple[int, ...],
    rounds: int,
    allreduce: Callable[[Tensor], object],
    done: Callable[[], object],
) -> list[dict[str, Any]]:
    """Return the rows for `sizes` in bytes; `done` returns when the device has finished all its work."""
    rows = []
    for size in sizes:
        x = torch.ones(size // 4, device=device)
        contestants = {name: Contestant(call) for name, call in calls(x, allreduce).items()}
        blocks = interleaved(contestants, rounds=rounds, clock=WallClock(done))
        bus = [down + up for down, up in zip(blocks[DOWN].wall, blocks[UP].wall, strict=True)]
        for name, block in blocks.items():
            row: dict[str, Any] = {"bytes": size, "who": name, "seconds": asdict(Spread.of(block.wall))}
            if name == STAGED:
                row["over_bus"] = asdict(ratios(block.wall, bus))
            rows.append(row)
    return rows


def goals(rows: list[dict[str, Any]]) -> list[Goal]:
    return [
        Goal(f"{row['bytes'] / 1e6:g} MB: {STAGED} over the bus", row["over_bus"]["median"], OVER_BUS)
        for row in rows
        if "over_bus" in row and row["bytes"] >= IN_LARGE
    ]


def cells(row: dict[str, Any]) -> list[object]:
    seconds = row["seconds"]["median"]
    over = str(Spread(**row["over_bus"])) if "over_bus" in row else ""
    rate = f"{row['bytes'] / seconds / 1e9:.2f}"
    return [f"{row['bytes'] / 1e6:g}", row["who"], f"{1e3 * seconds:.3f}", rate, over]
