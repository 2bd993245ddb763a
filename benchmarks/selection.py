"""The k elements of largest magnitude: our kernel against torch, numpy and one read of the array.

    python benchmarks/selection.py [--quick] [--cuda] [--json FILE]

`torch.topk` and `torch.kthvalue` are given `x.abs()`, and `numpy.argpartition` is given `numpy.abs(x)`. The
time for that counts as theirs, because a user would need it too. kthvalue finds only the threshold. "one
read" is `x.sum()` with as many threads, which adds up vectors as fast as memory delivers them; the table
shows it in GB/s. Contestants take turns: our kernel and the read in many rounds, our kernel and the slow ones
in few. --cuda runs selection/cuda.py instead, which measures the same on a GPU, against a copy.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness import Contestant, Goal, Run, Spread, interleaved, print_table, ratios
from hpcsgd import kernels
from selection import cuda

OURS, READ, TOPK = "hpcsgd", "one read", "torch.topk"
OVER_TOPK = 1 / 60
OVER_READ = {0.001: 2.0, 0.01: 2.5}
"""Goals, as ratios of seconds; the second is by the share of elements chosen."""
IN_MEMORY = 11_200_000
"""Number of elements from which on the goals hold, because a smaller array fits into a cache."""
SIZES = (1_000_000, IN_MEMORY, 25_600_000, 138_000_000)  # the last two: ResNet-50 and VGG-16


@dataclass(frozen=True)
class Case:
    n: int
    share: float
    elements: str
    threads: int

    @property
    def k(self) -> int:
        return int(self.n * self.share)


def normal(n: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).standard_normal(n, np.float32))


def heavy_tailed(n: int) -> torch.Tensor:
    """Return cubes of Laplace-distributed numbers, whose high kurtosis is like that of some gradients."""
    return torch.from_numpy(np.random.default_rng(0).laplace(size=n).astype(np.float32) ** 3)


ELEMENTS: dict[str, Callable[[int], torch.Tensor]] = {"normal": normal, "heavy-tailed": heavy_tailed}


def ours(x: torch.Tensor, k: int) -> torch.Tensor:
    starts, stops, counts = torch.tensor([0]), torch.tensor([len(x)]), torch.tensor([k])
    return kernels.largest(x, starts, stops, counts)


def slow(x: torch.Tensor, k: int) -> dict[str, Callable[[], object]]:
    array, n = x.numpy(), len(x)
    return {
        TOPK: lambda: torch.topk(x.abs(), k, sorted=False),
        "torch.kthvalue": lambda: torch.kthvalue(x.abs(), n - k + 1),
        "numpy.argpartition": lambda: np.argpartition(np.abs(array), n - k)[n - k :],
    }


def require_equal(x: torch.Tensor, k: int) -> None:
    """Require that our kernel finds the same magnitudes as topk, so that all contestants do the same work."""
    theirs = torch.topk(x.abs(), k, sorted=False).values
    assert torch.equal(x[ours(x, k)].abs().sort().values, theirs.sort().values)


def measured(case: Case, x: torch.Tensor, rounds: int, slow_rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each contestant; ratios are our time over its time in the same rounds."""
    torch.set_num_threads(case.threads)
    require_equal(x, case.k)
    own = {OURS: Contestant(lambda: ours(x, case.k))}
    groups = (
        ({READ: Contestant(x.sum)}, rounds),
        ({name: Contestant(select) for name, select in slow(x, case.k).items()}, slow_rounds),
    )
    for number, (others, count) in enumerate(groups):
        blocks = interleaved(own | others, rounds=count)
        for who in [OURS, *others] if number == 0 else others:
            seconds = Spread.of(blocks[who].wall)
            row = {**asdict(case), "k": case.k, "who": who, "seconds": asdict(seconds)}
            yield (
                row
                if who == OURS
                else row | {"ours_over": asdict(ratios(blocks[OURS].wall, blocks[who].wall))}
            )


def goals(rows: Iterable[dict[str, Any]]) -> list[Goal]:
    found = []
    for row in rows:
        limit = {TOPK: OVER_TOPK, READ: OVER_READ[row["share"]]}.get(row["who"])
        if row["n"] < IN_MEMORY or limit is None:
            continue
        case = f"{row['n']:,} {row['elements']}, {row['share']:.1%}, {row['threads']} thread(s)"
        found.append(Goal(f"{case}: ours over {row['who']}", row["ours_over"]["median"], limit))
    return found


def cells(row: dict[str, Any]) -> list[object]:
    seconds, over = row["seconds"]["median"], row.get("ours_over")
    rate = f"{4 * row['n'] / seconds / 1e9:.2f}"
    ratio = f"{over['median']:.4f} ({over['low']:.4f}–{over['high']:.4f})" if over else ""
    times = f"{1 / over['median']:.1f}" if over else ""
    return [
        f"{row['n']:,}", row["elements"], f"{row['share']:.1%}", row["threads"], row["who"],
        f"{1e3 * seconds:.3f}", rate, ratio, times,
    ]  # fmt: skip


HEAD = ["n", "elements", "k", "threads", "who", "ms", "GB/s", "ours over it (quartiles)", "ours is faster by"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Time to select the largest elements.")
    parser.add_argument(
        "--quick", action="store_true", help="take a minute: fewer sizes and rounds, normal elements"
    )
    parser.add_argument("--cuda", action="store_true", help="measure on a GPU instead")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.cuda:
        return cuda.measure(arguments.quick, arguments.json)
    library = kernels.native()
    if library is None:
        raise SystemExit("no native kernels to measure: pip install -e . where there is a C++ compiler")
    run = Run()
    sizes = SIZES[:-1] if arguments.quick else SIZES
    elements = ("normal",) if arguments.quick else tuple(ELEMENTS)
    rounds, slow_rounds = (15, 1) if arguments.quick else (60, 5)
    rows = []
    for n, kind in product(sizes, elements):
        x = ELEMENTS[kind](n)
        for share, threads in product(OVER_READ, (1, 2)):
            rows += measured(Case(n, share, kind, threads), x, rounds, slow_rounds)
    print(library)
    print_table(map(cells, rows), HEAD)
    run.conclude(rows, goals(rows), arguments.json, {"kernels": str(library)})


if __name__ == "__main__":
    main()
