"""Draw one-line mutants of the product by a seed, and try whether a tier of the tests notices them.

    python -m mutants [--count 150] [--seed 1] [--tier test|test-all] [--jobs 2] [--covered FILE] [--list]
                      [PATH ...]

in tests/. PATH is a file or a folder of the project, such as hpcsgd/engine; the default is all of hpcsgd.

The tier runs once, to record which test runs which line; with --covered, FILE has that for the next time,
as long as neither the product nor the tests change. Then each mutant is tried in a copy of the checkout:
the tests that run its line run until one of them fails. The program lists the mutants that survive, except
those in `EQUIVALENT`, which change nothing.
"""

from __future__ import annotations

import argparse
import queue
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mutants.equivalent import EQUIVALENT
from mutants.sites import Mutant, draw, mutants
from mutants.trial import Copy, Covered

ROOT = Path(__file__).parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m mutants", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=150, help="the number of mutants")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tier", choices=["test", "test-all"], default="test")
    parser.add_argument("--jobs", type=int, default=2, help="the number of mutants that are tried at a time")
    parser.add_argument("--covered", type=Path, metavar="FILE", help="which test runs which line")
    parser.add_argument("--list", action="store_true", help="only list the mutants")
    parser.add_argument("paths", nargs="*", metavar="PATH", help="file or folder to mutate (default: hpcsgd)")
    given = parser.parse_args()
    drawn = draw(mutants(ROOT, given.paths or ["hpcsgd"]), given.count, given.seed)
    if given.list:
        print(*sorted(map(str, drawn)), sep="\n")
        return
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies = [Copy(ROOT, Path(folder) / str(job)) for job in range(given.jobs)]
        survivors = try_all(drawn, given.tier, copies, covered_by(copies[0], given.tier, given.covered))
    unexplained = [mutant for mutant in survivors if mutant.key not in EQUIVALENT]
    killed = len(drawn) - len(survivors)
    print(f"make {given.tier} kills {killed} of {len(drawn)} mutants ({killed / len(drawn):.1%}).")
    print(f"{len(survivors) - len(unexplained)} others change nothing. Survivors:", *unexplained, sep="\n  ")


def covered_by(copy: Copy, tier: str, known: Path | None) -> Covered:
    """Return which test of the tier runs which line, from the file `known` if it exists."""
    if known is not None and known.exists():
        return Covered.read(known)
    covered = copy.covered(tier)
    if known is not None:
        covered.write(known)
    return covered


def try_all(drawn: list[Mutant], tier: str, copies: list[Copy], covered: Covered) -> list[Mutant]:
    """Try each mutant in one of the copies of the checkout, and return those that survive."""
    free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
    for copy in copies:
        free.put(copy)

    def survives(mutant: Mutant) -> bool:
        copy, began = free.get(), time.monotonic()
        try:
            killer = copy.killer(mutant, covered, tier)
        finally:
            free.put(copy)
        print(f"{time.monotonic() - began:5.0f} s  {mutant}\n         {killer or 'SURVIVES'}", flush=True)
        return killer is None

    with ThreadPoolExecutor(len(copies)) as pool:
        return [mutant for mutant, alive in zip(drawn, pool.map(survives, drawn), strict=True) if alive]


if __name__ == "__main__":
    main()
