"""Time that `hpcsgd simulate` takes for every rule, on 10,000 and 100,000 ranks, on one core.

    python benchmarks/simulation_speed.py [--quick] [--json FILE]

It simulates 1,000 steps with computing times that vary by a fifth, eight ranks per host, and messages that
queue there. Groups of one rank have the most events. With groups of eight, most of the work is to draw the
computing times. Each case runs in a process of its own, and its peak memory is recorded, including Python and
numpy.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

from harness import Goal, Run, WallClock, print_table
from hpcsgd.methods import (
    Method,
    ad_psgd,
    async_sgd,
    bsp,
    d_psgd,
    delayed,
    ensemble_sync,
    hierarchical,
    noloco,
    osgp,
    sgp,
    ssp,
)
from hpcsgd.performance.simulation import (
    Durations,
    Failures,
    Layout,
    LogNormal,
    Message,
    Simulation,
    simulate,
)

METHODS: dict[str, Callable[[], Method]] = {
    "ad_psgd": ad_psgd,
    "async_sgd": async_sgd,
    "bsp": bsp,
    "d_psgd": d_psgd,
    "delayed": lambda: delayed(hierarchical(sync_every=8), sync_delay=4),
    "ensemble": lambda: ensemble_sync(sync_every=8),
    "hierarchical": lambda: hierarchical(sync_every=8),
    "noloco": lambda: noloco(sync_every=8),
    "osgp": lambda: osgp(overlap_steps=1),
    "sgp": sgp,
    "ssp": lambda: ssp(max_staleness=2),
}
"""At least one method for each rule."""
SECONDS = {10_000: 60.0, 100_000: 600.0}
"""Goals, by the number of ranks."""
GIGABYTES = 2.0
RANKS_PER_HOST = 8


def measured(method: str, N: int, K: int, T: int) -> dict[str, Any]:
    simulation = Simulation(
        layout=Layout(N // K, K, RANKS_PER_HOST),
        compute=LogNormal(0.1, 0.2),
        durations=Durations(
            grad_reduce=0.01,
            update=0.002,
            model_average=0.05,
            gather=0.01,
            message=Message(latency=1e-5, link=5e-3),
        ),
        waits=METHODS[method]().waits,
        steps=T,
        steps_per_epoch=8,
        failures=Failures(mtbf_seconds=1e7, checkpoint_seconds=10, restart_seconds=60),
    )
    clock = WallClock()
    simulated = simulate(simulation)
    seconds = clock.stop()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "method": method, "N": N, "K": K, "T": T, "seconds": seconds, "gigabytes": memory / 1e9,
        "rank_steps_per_second": N * T / seconds, "simulated_seconds": simulated.seconds,
    }  # fmt: skip


def in_its_own_process(*case: Any) -> dict[str, Any]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measured, *case).result()


def goals(rows: Iterable[dict[str, Any]]) -> list[Goal]:
    found = []
    for row in rows:
        case = f"{row['method']}, {row['N']:,} ranks in groups of {row['K']}, {row['T']:,} steps"
        found.append(Goal(f"{case}: seconds", row["seconds"], SECONDS[row["N"]]))
        found.append(Goal(f"{case}: gigabytes", row["gigabytes"], GIGABYTES))
    return found


HEAD = ["method", "ranks", "K", "steps", "seconds", "GB", "rank steps/s"]


def cells(row: dict[str, Any]) -> list[object]:
    return [
        row["method"], f"{row['N']:,}", row["K"], f"{row['T']:,}", f"{row['seconds']:.2f}",
        f"{row['gigabytes']:.2f}", f"{row['rank_steps_per_second']:.3g}",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Time to simulate large jobs.")
    parser.add_argument("--quick", action="store_true", help="take half a minute: 10,000 ranks, 100 steps")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    run = Run()
    sizes, T = ((10_000,), 100) if arguments.quick else (tuple(SECONDS), 1000)
    rows = []
    for N, K, method in product(sizes, (8, 1), METHODS):
        rows.append(in_its_own_process(method, N, K, T))
        print(*cells(rows[-1]), flush=True)
    print_table(map(cells, rows), HEAD)
    run.conclude(rows, goals(rows), arguments.json)


if __name__ == "__main__":
    main()
