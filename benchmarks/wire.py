"""Time to encode and decode by quantizers, relative to one copy of the vector in memory, on one thread.

    python benchmarks/wire.py --json benchmarks/results/wire.json

A copy reads and writes four bytes per element. A format that takes at most twice the time of a copy encodes
at half the rate of memory, which is far faster than a network.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness.record import Goal, Run
from harness.table import print_table
from harness.timing import Contestant, Spread, interleaved, ratios
from hpcsgd import kernels, quantizers
from hpcsgd.methods.sparseloco import VALUES
from hpcsgd.parts.averagers import PerBlock
from hpcsgd.parts.averagers.sparse_message import SparseMessage
from hpcsgd.parts.quantizers.base import Quantizer

COPY = "copy"
OVER_COPY = 2.0
"""Goal for the time of a format, as a multiple of the time of a copy."""
IN_MEMORY = 11_200_000
"""Number of elements from which on the goals hold, because a smaller vector fits into a cache."""
SIZES = (1_000_000, IN_MEMORY, 25_600_000)
QUANTIZERS: dict[str, Quantizer] = {
    "bf16": quantizers.bf16(),
    "fp16": quantizers.fp16(),
    "int8": quantizers.int8(),
    "int8 stochastic": quantizers.int8(rounding=quantizers.Stochastic()),
    "int4": quantizers.int4(),
    "int4 stochastic": quantizers.int4(rounding=quantizers.Stochastic()),
    "int2": quantizers.int2(),
}


def contestants(x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Return the contestants, each with a buffer of its own whose memory has been touched."""
    room = torch.zeros_like(x)
    found: dict[str, Callable[[], object]] = {COPY: lambda: room.copy_(x)}
    for name, wire in QUANTIZERS.items():
        code = torch.zeros(wire.nbytes(x.numel()), dtype=torch.uint8)
        found[f"pack {name}"] = lambda wire=wire, code=code: wire.encode(x, code, 1)
        if "stochastic" not in name:  # how values were rounded does not matter for decoding
            found[f"unpack {name}"] = lambda wire=wire, code=code: wire.decode(code, room)
    return found | sparse(x)


def sparse(x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Return the parts of `sparseloco`'s message, 64 of 4096 values in two bits, and of its indices alone."""
    share = PerBlock().expected(x.numel(), 1 / 64)
    segments = (share.starts, share.stops, share.k)
    whole, indices = SparseMessage(share, VALUES[2]), share.largest_of(x)
    said, places = torch.zeros(whole.nbytes, dtype=torch.uint8), kernels.encode_chosen(indices, *segments)
    return {
        "select 64 of 4096": lambda: share.largest_of(x),
        "code their indices": lambda: kernels.encode_chosen(indices, *segments),
        "decode them": lambda: kernels.decode_chosen(places, *segments),
        "select and say all": lambda: whole.write(x, said),
        "hear all": lambda: whole.read(said),
    }


def measured(n: int, rounds: int) -> Iterator[dict[str, Any]]:
    x = torch.from_numpy(np.random.default_rng(0).standard_normal(n, np.float32))
    blocks = interleaved({name: Contestant(call) for name, call in contestants(x).items()}, rounds=rounds)
    for name, block in blocks.items():
        over = ratios(block.wall, blocks[COPY].wall)
        yield {"n": n, "who": name, "seconds": asdict(Spread.of(block.wall)), "over_copy": asdict(over)}


def goals(rows: list[dict[str, Any]]) -> list[Goal]:
    return [
        Goal(f"{row['n']:,}: {row['who']} over a copy", row["over_copy"]["median"], OVER_COPY)
        for row in rows
        if row["n"] >= IN_MEMORY and row["who"] != COPY
    ]


def cells(row: dict[str, Any]) -> list[object]:
    seconds, over = row["seconds"]["median"], row["over_copy"]
    ratio = f"{over['median']:.3f} ({over['low']:.3f}–{over['high']:.3f})"
    return [f"{row['n']:,}", row["who"], f"{1e3 * seconds:.3f}", f"{4 * row['n'] / seconds / 1e9:.2f}", ratio]


HEAD = ["n", "who", "ms", "GB/s of float32", "over a copy (quartiles)"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of quantizers relative to a copy in memory.")
    parser.add_argument("--quick", action="store_true", help="take seconds: fewer sizes and rounds")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    library = kernels.native()
    if library is None:
        raise SystemExit("no native kernels to measure: pip install -e . where there is a C++ compiler")
    run = Run()
    torch.set_num_threads(1)
    sizes, rounds = (SIZES[:2], 10) if arguments.quick else (SIZES, 60)
    rows = [row for n in sizes for row in measured(n, rounds)]
    print(library)
    print_table(map(cells, rows), HEAD)
    run.conclude(rows, goals(rows), arguments.json, {"kernels": str(library)})


if __name__ == "__main__":
    main()
