"""A step of one rank compared with plain torch: seconds, waits of the host, and memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

import hpcsgd
from gpu.models import MOMENTS, Subject, subjects
from gpu.section import Found, Setting
from gpu.waits import waits_of
from harness import Contestant, Goal, Spread, WallClock, interleaved, ratios
from harness.workloads import Step
from hpcsgd.core.layout import bucket_bytes, nbytes
from hpcsgd.core.traffic import ModelLayout
from hpcsgd.cost.memory import kept
from hpcsgd.engine.plan import StepPlan

EVERY = 8
PLAIN = "plain torch"
OVER_PLAIN = 1.01
"""Goal: ratio of seconds per step."""
MORE_MEMORY = 1.0
"""Goal: peak of memory, relative to that of plain torch plus what the formula adds to it."""
COUNTED = 8
"""Number of steps whose waits are counted; with sync_every=8 one of them synchronizes."""
HEAD = ["model", "who", "ms/step", "over plain (quartiles)", "peak MB", "allowed MB", "waits in 8 steps"]


@dataclass(frozen=True)
class Entry:
    make: Callable[[Subject], Step]
    method: hpcsgd.Method | None = None


def entries() -> dict[str, Entry]:
    def of(method: hpcsgd.Method) -> Entry:
        topology = hpcsgd.init()
        return Entry(lambda subject: subject.ours(topology, method), method)

    return {
        PLAIN: Entry(lambda subject: subject.plain()),
        "bsp": of(hpcsgd.bsp()),
        f"hierarchical({EVERY})": of(hpcsgd.hierarchical(EVERY)),
    }


def measure(setting: Setting, found: Found) -> None:
    for subject in subjects(setting):
        contestants = entries()
        peaks = {name: peak(subject, entry) for name, entry in contestants.items()}
        steps = {name: entry.make(subject) for name, entry in contestants.items()}
        waits = {name: waits_of(step, COUNTED, setting) for name, step in steps.items()}
        clock = (
            WallClock(lambda: torch.accelerator.synchronize(setting.device))
            if setting.kind != "cpu"
            else WallClock()
        )
        count = setting.of(4, 2, 1)
        blocks = interleaved(
            {name: Contestant(step, count) for name, step in steps.items()},
            rounds=setting.of(8, 4, 2),
            clock=clock,
        )
        allowed = {
            name: peaks[PLAIN] + added(subject, entry.method)
            for name, entry in contestants.items()
            if entry.method
        }
        rows = [
            {
                "model": subject.name,
                "who": name,
                "seconds": asdict(Spread.of(block.wall)),
                "ratio": asdict(ratios(block.wall, blocks[PLAIN].wall)),
                "peak_bytes": peaks[name],
                "allowed_bytes": allowed.get(name),
                "waits": dict(waits[name]),
            }
            for name, block in blocks.items()
        ]
        found.show("step", rows, HEAD, list(map(cells, rows)), goals(rows))
        del steps, blocks
        gc.collect()


def peak(subject: Subject, entry: Entry) -> int:
    """Return the peak of bytes on the device in a step, for a contestant that runs alone; 0 on the CPU."""
    if subject.device.type != "cuda":
        return 0
    gc.collect()
    before = torch.accelerator.memory_allocated(subject.device)
    step = entry.make(subject)
    for _ in range(2):
        step()
    torch.accelerator.reset_peak_memory_stats(subject.device)
    step()
    return torch.accelerator.max_memory_allocated(subject.device) - before


def added(subject: Subject, method: hpcsgd.Method) -> float:
    """Return the bytes that one rank keeps, by the formula of `hpcsgd plan`, beyond what plain torch keeps.

    Plain torch keeps parameters and optimizer state, but no gradients, which `zero_grad` frees.
    """
    with torch.device("meta"):
        trained = [(name, p) for name, p in subject.make().named_parameters() if p.requires_grad]
    model = nbytes(p for _, p in trained)
    sizes = ModelLayout.of(trained, 1, 1, bucket_bytes(model))
    return kept(StepPlan.of(method), sizes, MOMENTS) - (1 + MOMENTS) * model


def goals(rows: list[dict[str, Any]]) -> list[Goal]:
    named = next(row["waits"] for row in rows if row["who"] == PLAIN)
    found: list[Goal] = []
    for row in rows:
        about = f"{row['model']}: {row['who']}"
        if row["who"] != PLAIN:
            waits = sum(row["waits"].values()) - sum(named.values())
            found.append(Goal(f"{about} over {PLAIN}", row["ratio"]["median"], OVER_PLAIN))
            found.append(Goal(f"{about}: waits of the host beyond those of {PLAIN}", max(waits, 0), 0))
            if row["peak_bytes"]:
                over = row["peak_bytes"] / row["allowed_bytes"]
                found.append(Goal(f"{about}: peak of memory over the formula", over, MORE_MEMORY))
    return found


def cells(row: dict[str, Any]) -> list[object]:
    allowed = "" if row["allowed_bytes"] is None else f"{row['allowed_bytes'] / 1e6:.0f}"
    waits = ", ".join(f"{count} x {what}" for what, count in row["waits"].items()) or "none"
    ratio, peak = Spread(**row["ratio"]), f"{row['peak_bytes'] / 1e6:.0f}"
    return [row["model"], row["who"], f"{1e3 * row['seconds']['median']:.2f}", ratio, peak, allowed, waits]
