"""Draw one-line mutants of the product by a seed, and try whether a tier of the tests notices them.

    python -m mutants [--count 150] [--seed 1] [--tier test|test-all] [--jobs 2] [--list] [PATH ...]

in tests/. PATH is a file or a folder of the project, such as hpcsgd/engine; the default is all of hpcsgd.

The tier runs once, to record which test runs which line. Then each mutant is tried in a copy of the checkout:
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
from mutants.trial import Copy

ROOT = Path(__file__).parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m mutants", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=150, help="the number of mutants")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tier", choices=["test", "test-all"], default="test")
    parser.add_argument("--jobs", type=int, default=2, help="the number of mutants that are tried at a time")
    parser.add_argument("--list", action="store_true", help="only list the mutants")
    parser.add_argument("paths", nargs="*", metavar="PATH", help="file or folder to mutate (default: hpcsgd)")
    given = parser.parse_args()
    drawn = draw(mutants(ROOT, given.paths or ["hpcsgd"]), given.count, given.seed)
    if given.list:
        print(*sorted(map(str, drawn)), sep="\n")
        return
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        survivors = try_all(drawn, given.tier, [Path(folder) / str(job) for job in range(given.jobs)])
    unexplained = [mutant for mutant in survivors if mutant.key not in EQUIVALENT]
    killed = len(drawn) - len(survivors)
    print(f"make {given.tier} kills {killed} of {len(drawn)} mutants ({killed / len(drawn):.1%}).")
    print(f"{len(survivors) - len(unexplained)} others change nothing. Survivors:", *unexplained, sep="\n  ")


def try_all(drawn: list[Mutant], tier: str, folders: list[Path]) -> list[Mutant]:
    """Try each mutant, in one copy of the checkout per folder, and return those that survive."""
    copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
    made = [Copy(ROOT, folder) for folder in folders]
    covered = made[0].covered(tier)
    for copy in made:
        copies.put(copy)

    def survives(mutant: Mutant) -> bool:
        copy, began = copies.get(), time.monotonic()
        try:
            killer = copy.killer(mutant, covered, tier)
        finally:
            copies.put(copy)
        print(f"{time.monotonic() - began:5.0f} s  {mutant}\n         {killer or 'SURVIVES'}", flush=True)
        return killer is None

    with ThreadPoolExecutor(len(made)) as pool:
        return [mutant for mutant, alive in zip(drawn, pool.map(survives, drawn), strict=True) if alive]


if __name__ == "__main__":
    main()
