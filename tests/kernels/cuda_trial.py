"""A few cases that reach every line of csrc/cuda/, in a process that may crash.

Usage: `python -m kernels.cuda_trial LIBRARY SEEDS`. It serves to run kernels with sanitizers, and kernels
with planted faults. With `gpu` instead of a library the cases run on the GPU; with `cpu` the library is built
first.

Tensors lie at the end of their memory, so that a sanitizer notices an access to the next element.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import torch

from arrays import at_the_end, cuts, few_values, lists, made, normal, one_huge, periodic
from hpcsgd.kernels.cuda import GROUP, TILE, Cuda
from kernels import on_cpu as compiler
from kernels.cuda_cases import (
    Place,
    check_above,
    check_accumulate,
    check_largest,
    check_pack,
    check_threshold,
    on_cpu,
    on_gpu,
    sample,
)


def run_all(place: Place, rng: np.random.Generator) -> None:
    largest_of_one(place, rng)
    largest_of_several(place, rng)
    misjudged(place, rng)
    check_threshold(place, made(normal, rng, 30_000), 500)
    above_and_accumulate(place, rng)
    packing(place, rng)


def largest_of_one(place: Place, rng: np.random.Generator) -> None:
    group = GROUP * TILE
    for maker, n, k, shift in [
        (normal, 1, 1, 3), (few_values, 70, 20, 1), (normal, TILE + 1, 90, 2), (normal, 70_001, 700, 0),
        (few_values, 2 * TILE - 2, 9000, 3), (periodic, 20_011, 40, 1), (one_huge, group + 9, 5, 0),
        (normal, 3 * group + 77, 4000, 1), (at_the_end, 2 * group - 3, 300, 2),
    ]:  # fmt: skip
        check_largest(place, made(maker, rng, n), *lists([0], [n], [k]), shift=shift)


def largest_of_several(place: Place, rng: np.random.Generator) -> None:
    for maker, n, segments in [(normal, 100_000, 3), (few_values, 40_000, 9)]:
        check_largest(place, made(maker, rng, n), *cuts(rng, n, segments), shift=segments % 4)


def misjudged(place: Place, rng: np.random.Generator) -> None:
    """Segments whose sample gives too few candidates, or more than there is room for."""
    n, k = 3 * TILE + 5, 200
    places = torch.from_numpy(sample(place.library, n))
    for factor in (1e3, 1e-3):
        x = made(normal, rng, n)
        x[places] *= factor
        check_largest(place, torch.cat([x, made(normal, rng, n)]), *lists([0, n], [n, 2 * n], [k, k]))


def above_and_accumulate(place: Place, rng: np.random.Generator) -> None:
    for n, shift in [(1, 0), (TILE - 3, 3), (TILE + 1, 1), (50_001, 2)]:
        check_above(place, made(normal, rng, n), 1.0, shift)
        starts = torch.tensor([0, n // 3, n // 3, n])
        for dtype, shifts in [
            (torch.float32, (shift, 0)),
            (torch.float16, (0, shift)),
            (torch.bfloat16, (2, 2)),
        ]:
            check_accumulate(place, made(normal, rng, n), made(normal, rng, n).to(dtype), starts, shifts)


def packing(place: Place, rng: np.random.Generator) -> None:
    for n, block, shifts in [(1, 8, (1, 0)), (65, 64, (0, 1)), (5003, 256, (3, 2)), (4099, 24, (0, 0))]:
        for bits in (8, 4):
            for draw in (None, 7):
                check_pack(place, made(normal, rng, n), block, bits, draw, shifts)


def main(library: str, seeds: str) -> None:
    for seed in range(int(seeds)):
        with place(library, seed) as there:
            run_all(there, np.random.default_rng(seed))


def place(library: str, seed: int) -> AbstractContextManager[Place]:
    if library == "gpu":
        return on_gpu(Cuda.load())
    path = compiler.built(compiler.sources()) if library == "cpu" else Path(library)
    return on_cpu(path, seed=seed, one_of=3, guard=0)


if __name__ == "__main__":
    main(*sys.argv[1:])
