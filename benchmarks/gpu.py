"""Training on GPUs, as this machine has them: does it hold, and what does it cost?

    python benchmarks/gpu.py [--quick] [--json FILE]

One command for whoever has a GPU: the tests of the kernels on it, the kernels beside torch.topk and a copy
(`selection.py --cuda`), what travels by way of the host against the bus, a step and its memory beside plain
torch and, with several GPUs, DistributedDataParallel over NCCL (`step_overhead.py`, a rank to a GPU). Where
there is none it says so, and that nothing was measured.
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path
from typing import Any

import torch

from gpu import staging
from harness import Goal, Run, print_table, programs
from harness.launching import BENCHMARKS
from hpcsgd import kernels
from hpcsgd.transport import Transport, threads
from hpcsgd.transport.streams import accelerator, settle
from selection import cuda as selection
from step_overhead import rows as steps

BATTERY = ("tests/kernels/test_cuda.py",)
"""Of the repository: what is skipped without a GPU."""
SIZES = (64_000, 1_000_000, 16_000_000, 256_000_000)
Rows = list[dict[str, Any]]


def battery() -> tuple[Rows, list[Goal]]:
    """Whether all of it passes, skipping nothing."""
    command = [sys.executable, "-m", "pytest", "-q", "-rs", *BATTERY]
    done = programs.run(command, cwd=BENCHMARKS.parent, timeout=3600, check=False)
    said = done.stdout.strip().splitlines()[-1:]
    print(*said)
    held = done.returncode == 0 and "skipped" not in "".join(said)
    row = {"part": "battery", "files": BATTERY, "code": done.returncode, "said": said}
    return [row], [Goal("tests that fail or are skipped", float(not held), 0)]


def selecting(device: torch.device, quick: bool) -> tuple[Rows, list[Goal]]:
    if device.type != "cuda" or kernels.cuda(device) is None:
        print("no CUDA kernels here: torch.topk serves")
        return [], []
    rows = selection.rows_of(device, quick)
    print_table(map(selection.cells, rows), selection.HEAD)
    return [{"part": "selection", **row} for row in rows], selection.goals(rows)


def staged(device: torch.device, quick: bool) -> tuple[Rows, list[Goal]]:
    def one_rank(world: Transport) -> Rows:
        done = functools.partial(settle, device)
        sizes, rounds = (SIZES[:3], 5) if quick else (SIZES, 30)
        return staging.rows_of(device, sizes, rounds, lambda x: world.allreduce(x).wait(), done)

    rows = threads.run(1, one_rank)[0]
    print_table(map(staging.cells, rows), staging.HEAD)
    return [{"part": "staging", **row} for row in rows], staging.goals(rows)


def stepping(device: torch.device, quick: bool) -> tuple[Rows, list[Goal]]:
    rounds, block = (3, 2) if quick else (16, 20)
    counts = sorted({1, torch.accelerator.device_count()})
    found = [steps.measured(n, rounds, block, timeout=1800, device=device.type)[0] for n in counts]
    rows = [row for of_count in found for row in of_count]
    with_memory = [[*steps.cells(row), f"{row['peak_device_bytes'] / 1e6:.0f}"] for row in rows]
    print_table(with_memory, [*steps.HEAD, "memory MB"])
    return [{"part": "step", **row} for row in rows], steps.goals(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Training on the GPUs of this machine.")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds: that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    run, kind = Run(), accelerator()
    if kind is None:
        print("no GPU here: nothing was measured")
        return run.conclude([], [], arguments.json, {"gpu": None})
    device = torch.device(kind.type, torch.accelerator.current_device_index())
    parts = [battery(), *(part(device, arguments.quick) for part in (selecting, staged, stepping))]
    rows = [row for found, _ in parts for row in found]
    goals = [goal for _, found in parts for goal in found]
    gpus = {"gpu": str(device), "gpus": torch.accelerator.device_count()}
    run.conclude(rows, goals, arguments.json, gpus)


if __name__ == "__main__":
    main()
