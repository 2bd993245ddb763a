"""The kernels compared with what a GPU can do.

Selection is compared with torch.topk and with a copy, and DEFT's selection with torch.topk. Quantizers are
compared with a copy. Copies to the host and back are timed too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from gpu import staging
from gpu.section import Found, Setting
from harness import Contestant, Goal, Spread, interleaved, ratios
from hpcsgd import kernels as native
from hpcsgd.comm import Communicator, mpi, threads
from hpcsgd.comm.streams import settle
from hpcsgd.parts import quantizers
from hpcsgd.parts.quantizers.base import Quantizer
from hpcsgd.parts.sparsifiers import Deft
from hpcsgd.parts.sparsifiers.base import Accumulated
from selection import cuda as selection

SIZES = (64_000, 1_000_000, 16_000_000, 25_600_000, 256_000_000)
OF_WIRES = (1_000_000, 25_600_000, 256_000_000)
QUANTIZERS: dict[str, Callable[[], Quantizer]] = {
    "bf16": quantizers.bf16,
    "int8": quantizers.int8,
    "int4": quantizers.int4,
}
COPY = "copy"
OF_A_COPY = 0.4
"""Goal: elements per second, as a share of those of a copy in the memory of the device."""
WORKERS, LAYERS, DENSITY = 8, 161, 0.01
WIRE_HEAD = ["n", "who", "µs", "GB/s of float32", "over a copy (quartiles)"]
KERNEL_HEAD = ["n", "kernel", "µs of one selection"]
DEFT_HEAD = ["n", "who", "µs", "torch.topk of all µs"]


def measure(setting: Setting, found: Found) -> None:
    device = setting.device
    rounds = setting.of(20, 5, 2)
    sizes = setting.of(OF_WIRES, OF_WIRES[:2], (5_000,))
    rows = [row for n in sizes for row in packing(device, n, selection.fewer(rounds, n))]
    found.show("wires", rows, WIRE_HEAD, [cells(row) for row in rows], goals(rows))

    chosen = setting.of(SIZES, SIZES[:4], (64_000,))
    rows = selection.rows_of(device, chosen, rounds, setting.quick or setting.rehearse or max(chosen) > 10**8)
    found.show("selection", rows, selection.HEAD, list(map(selection.cells, rows)), selection.goals(rows))
    if setting.on_gpu:
        rows = [row for n in chosen if n >= selection.IN_MEMORY for row in kernel_by_kernel(device, n)]
        table = [[f"{row['n']:,}", row["kernel"], f"{1e6 * row['seconds']:.1f}"] for row in rows]
        found.show("selection by kernel", rows, KERNEL_HEAD, table)

    rows = [
        deft(device, n, selection.fewer(rounds, n))
        for n in setting.of((25_600_000, 256_000_000), (25_600_000,), (64_000,))
    ]
    table = [
        [row["n"], "DEFT, slowest worker", f"{1e6 * row['slowest']:.1f}", f"{1e6 * row['topk']:.1f}"]
        for row in rows
    ]
    found.show("deft", rows, DEFT_HEAD, table)

    sizes = setting.of((64_000, 1_000_000, 16_000_000, 256_000_000), (64_000, 16_000_000), (64_000,))
    rows = staged(device, sizes, rounds, mpi.world())
    found.show("staging", rows, staging.HEAD, list(map(staging.cells, rows)), staging.goals(rows))


def kernel_by_kernel(device: torch.device, n: int) -> list[dict[str, Any]]:
    """Return the seconds of each kernel and copy in one selection of the 1 % largest elements, in order."""
    x = torch.randn(n, device=device, generator=torch.Generator(device).manual_seed(0))
    segment = (torch.tensor([0]), torch.tensor([n]), torch.tensor([n // 100]))
    native.largest(x, *segment)
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(selection.CALLS):
            native.largest(x, *segment)
        torch.cuda.synchronize(device)
    seconds: dict[str, float] = {}
    for event in profiler.events() or ():
        name = event.name.partition("(")[0]
        seconds[name] = seconds.get(name, 0.0) + event.device_time / 1e6 / selection.CALLS
    return [{"n": n, "kernel": name, "seconds": each} for name, each in seconds.items() if each]


def packing(device: torch.device, n: int, rounds: int) -> list[dict[str, Any]]:
    """Return the seconds of each quantizer in both directions, and of a copy of the vector."""
    x = torch.randn(n, device=device, generator=torch.Generator(device).manual_seed(0))
    room = torch.zeros_like(x)
    calls: dict[str, Callable[[], object]] = {COPY: lambda: room.copy_(x)}
    for name, make in QUANTIZERS.items():
        wire = make()
        code = torch.zeros(wire.nbytes(n), dtype=torch.uint8, device=device)
        calls[f"pack {name}"] = functools.partial(wire.encode, x, code, 1)
        calls[f"unpack {name}"] = functools.partial(wire.decode, code, room)
    contestants = {who: Contestant(call, selection.CALLS) for who, call in calls.items()}
    blocks = interleaved(contestants, rounds=rounds, clock=selection.clock_of(device))
    return [
        {
            "n": n,
            "who": who,
            "seconds": asdict(Spread.of(block.wall)),
            "over_copy": asdict(ratios(block.wall, blocks[COPY].wall)),
        }
        for who, block in blocks.items()
    ]


def goals(rows: Sequence[dict[str, Any]]) -> list[Goal]:
    return [
        Goal(f"{row['n']:,}: {row['who']} over a copy", row["over_copy"]["median"], 1 / OF_A_COPY)
        for row in rows
        if row["who"] != COPY and row["n"] >= selection.IN_MEMORY
    ]


def cells(row: dict[str, Any]) -> list[object]:
    seconds = row["seconds"]["median"]
    rate, over = f"{4 * row['n'] / seconds / 1e9:.0f}", str(Spread(**row["over_copy"]))
    return [f"{row['n']:,}", row["who"], f"{1e6 * seconds:.1f}", rate, over]


def deft(device: torch.device, n: int, rounds: int) -> dict[str, Any]:
    """Return the seconds of the slowest of 8 workers and of topk, without the time to compute norms."""
    starts, stops = selection.layers(n, LAYERS)
    bounds = torch.cat([starts, stops[-1:]])
    method = Deft(DENSITY)
    cut = method.cut(bounds, WORKERS)
    x = torch.randn(n, device=device, generator=torch.Generator(device).manual_seed(0))
    acc = torch.zeros_like(x)
    norms = native.accumulate(acc, x, cut)

    def share(world: Communicator) -> Any:
        return method.share(Accumulated(acc, cut, norms), 0, world)

    shares = threads.run(WORKERS, share)
    calls: dict[str, Callable[[], object]] = {
        f"worker {i}": functools.partial(each.largest_of, acc) for i, each in enumerate(shares)
    }
    k = int(DENSITY * n)
    contestants = {who: Contestant(call) for who, call in calls.items()}
    contestants["topk"] = Contestant(lambda: torch.topk(acc.abs(), k, sorted=False))
    blocks = interleaved(contestants, rounds=rounds, clock=selection.clock_of(device))
    medians = {who: Spread.of(block.wall).median for who, block in blocks.items()}
    return {
        "n": n,
        "workers": WORKERS,
        "slowest": max(medians[who] for who in calls),
        "topk": medians["topk"],
    }


def staged(
    device: torch.device, sizes: tuple[int, ...], rounds: int, world: Communicator
) -> list[dict[str, Any]]:
    """Return the time of an operation of one rank through the host, and of the copies that it consists of."""

    def allreduce(x: Tensor) -> None:
        world.allreduce(x).wait()

    done = functools.partial(settle, device) if device.type != "cpu" else (lambda: None)
    return staging.rows_of(device, sizes, rounds, allreduce, done)
