"""SelSync compared with BSP, FedAvg and SSP: the paper's experiments on a small scale, one part at a time.

    hpcsgd data convert mnist FOLDER DATA/mnist.h5
    python benchmarks/selsync.py --table --data DATA [--plot FILE]       Table I: 8 workers on slow links
    python benchmarks/selsync.py --partition --data DATA                 SelDP or DefDP, PA or GA (IV-C, IV-D)
    python benchmarks/selsync.py --non-iid --data DATA [--plot FILE]     one label per worker (fig. 12)
    python benchmarks/selsync.py --overhead                              time of Δ and its exchange per step

Each also takes --json FILE and --quick (a minute, to see that it runs). A CNN trains on the first images of
MNIST, with batches of 32 per worker. All use the same learning rate, which falls twice. The hosts of --table
are network namespaces, which need root.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import Goal, Run
from harness.stores import first_images
from selsync import data, overhead, table

PARTS: dict[str, Callable[[Path, bool, Path | None], tuple[list[dict[str, Any]], list[Goal], dict[str, Any]]]]
PARTS = {
    "table": table.measure,
    "partition": data.partitions,
    "non_iid": data.non_iid,
    "overhead": overhead.measure,
}
"""Each function prints its table and returns rows, goals and further data for the record."""
IMAGES = {"table": 6400, "partition": 9600, "non_iid": 12000}
QUICK = 1280


def main() -> None:
    parser = argparse.ArgumentParser(description="SelSync compared with other methods.")
    part = parser.add_mutually_exclusive_group(required=True)
    for name in PARTS:
        part.add_argument(f"--{name.replace('_', '-')}", dest="part", action="store_const", const=name)
    parser.add_argument("--data", type=Path, default=Path(), help="the folder with mnist.h5")
    parser.add_argument("--quick", action="store_true", help="check within a minute that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    given = parser.parse_args()
    run = Run()
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "images.h5"
        if given.part in IMAGES:
            first_images(given.data / "mnist.h5", QUICK if given.quick else IMAGES[given.part], store)
        rows, goals, more = PARTS[given.part](store, given.quick, given.plot)
    run.conclude(rows, goals, given.json, more)


if __name__ == "__main__":
    main()
