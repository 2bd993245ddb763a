"""The figures of the EnsembleSync paper.

Xie and Yasunaga, EnsembleSync: Reliable Distributed SGD with Less Communication.

    python benchmarks/papers/ensemblesync.py --list
    python benchmarks/papers/ensemblesync.py --figure 2 --data DATA [--quick] [--json FILE] [--plot FILE]
    python benchmarks/papers/ensemblesync.py --figure 2 --kept
    python benchmarks/papers/ensemblesync.py --figure 2 --scale paper --data DATA --out FOLDER

Figure 2 is a table, which the paper's text calls table 2. The paper has no other table. DATA is a folder with
cifar10.h5 and digits.h5, which `hpcsgd data convert` writes. All figures except figure 5 need root, because
their hosts are network namespaces.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from papers.artifact import Artifact, Artifacts, Small, main
from papers.beside import ensemblesync as beside
from papers.original import ensemblesync as original
from papers.sources import benchmark

SPEED = benchmark("ensemble.py", "--speed", "--seeds", "1", "--epochs", "4", "--rounds", "6")
LINK = "ResNet-8, two hosts"

ARTIFACTS: Artifacts = {
    "Figure 1": Artifact("sync SGD, async SGD and EnsembleSync"),
    "Figure 2": Artifact(
        "time and accuracy in normal execution",
        Small(SPEED, beside.figure_2, "ensemble_speed.json"),
        original.normal_jobs,
        f"{LINK}; 4 epochs, not 100; with natural gradient 4.7 points ahead "
        "([more](../../docs/ensemble.md#measured))",
    ),
    "Figure 3": Artifact(
        "time by epoch",
        Small(SPEED, beside.figure_3, "ensemble_speed.json", beside.epoch_panels),
        original.normal_jobs,
        f"{LINK}; async SGD's server takes turns",
    ),
    "Figure 4": Artifact(
        "a worker that fails and comes back",
        Small(benchmark("ensemble.py", "--faults", data=False), beside.figure_4, "ensemble_faults.json"),
        original.faulty_jobs,
        "only EnsembleSync, four groups",
    ),
    "Figure 5": Artifact(
        "progress, and what a slow worker is given",
        Small(
            benchmark("ensemble.py", "--reallocation"),
            beside.figure_5,
            "ensemble_reallocation.json",
            beside.unit_panels,
        ),
        original.faulty_jobs,
        "sleeping workers; 16 units, not 256",
    ),
}

if __name__ == "__main__":
    main("EnsembleSync", ARTIFACTS)
