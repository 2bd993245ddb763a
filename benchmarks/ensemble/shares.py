"""`ensemble.py --shares`: does EnsembleSync reach sync SGD's accuracy if its workers' samples overlap?

In the paper each of two workers draws three quarters of the samples per epoch, and EnsembleSync ends 1.1
points ahead of sync SGD. Here groups of one rank train with benchmarks/jobs/cifar10_resnet8.toml, as in
speed.py. They train on halves of the samples, which are drawn again in each epoch, and on overlapping shares
of three quarters. All contestants make about the same number of steps with equal batches, and EnsembleSync
synchronizes ten times per epoch. An epoch of three quarters has 1.5 times as many steps, so there are fewer
epochs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from ensemble.speed import images, train
from harness import Goal, print_table
from hpcsgd.data import ImageDataset

BATCH, GROUPS = 16, 2
SYNC, HALVES, OVERLAPPING = "sync SGD", "EnsembleSync, halves", "EnsembleSync, three quarters"
SHARES = {SYNC: None, HALVES: None, OVERLAPPING: 0.75}
Row = dict[str, Any]


def shares(data: Path, *, quick: bool, epochs: int, seeds: int) -> tuple[list[Row], list[Goal]]:
    """Train all contestants; return rows and goals. `epochs` counts passes through all samples."""
    if quick:
        epochs, seeds = 3, 1
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        store = images(data, folder / "store.h5", quick=quick)
        samples = len(ImageDataset(store, "train"))
        for seed in range(1, seeds + 1):
            for name, share in SHARES.items():
                own = samples * (share or 1 / GROUPS)
                passes = GROUPS * own / samples
                row = train(
                    name.partition(",")[0], store, folder, round(own / BATCH), round(epochs / passes), seed,
                    quick=quick, share=share,
                )  # fmt: skip
                rows.append({**row, "who": name, "passes": passes * row["epochs"]})
    table = [_cells(name, [row for row in rows if row["who"] == name], rows) for name in SHARES]
    print_table(table, ["who", "epochs", "passes", "seeds", "accuracy %", "points behind sync SGD"])
    return rows, [
        Goal(f"points of {name} behind sync SGD", behind(name, rows), 0.0) for name in SHARES if name != SYNC
    ]


def behind(name: str, rows: Sequence[Row]) -> float:
    """Return by how many points of accuracy `name` is behind sync SGD, as a mean over the seeds."""
    last = {(row["who"], row["seed"]): 100 * row["accuracy"][-1] for row in rows}
    return mean(last[SYNC, seed] - accuracy for (who, seed), accuracy in last.items() if who == name)


def _cells(name: str, runs: Sequence[Row], rows: Sequence[Row]) -> list[object]:
    last = [100 * run["accuracy"][-1] for run in runs]
    spread = f"{mean(last):.2f} ({min(last):.2f}–{max(last):.2f})"
    told = "" if name == SYNC else f"{behind(name, rows):.2f}"
    return [name, runs[0]["epochs"], f"{runs[0]['passes']:g}", len(runs), spread, told]
