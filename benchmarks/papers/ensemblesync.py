"""EnsembleSync: Reliable Distributed SGD with Less Communication (Xie and Yasunaga): its figures.

    python benchmarks/papers/ensemblesync.py --list
    python benchmarks/papers/ensemblesync.py --figure 2 --data DATA [--quick] [--json FILE] [--plot FILE]
    python benchmarks/papers/ensemblesync.py --figure 2 --kept
    python benchmarks/papers/ensemblesync.py --figure 2 --scale paper --data DATA --out FOLDER

Figure 2 is a table, which the text calls table 2; there is no other. DATA: a folder with cifar10.h5 and
digits.h5 by `hpcsgd data convert`. All but figure 5 as root, on hosts made of network namespaces.
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
LINK = "ResNet-8, two hosts with a link as slow beside computing as the paper's"

ARTIFACTS: Artifacts = {
    "Figure 1": Artifact("sync SGD, async SGD and EnsembleSync"),
    "Figure 2": Artifact(
        "time and accuracy in normal execution",
        Small(SPEED, beside.figure_2, "ensemble_speed.json"),
        original.normal_jobs,
        f"{LINK}; 4 epochs on halves of the data instead of 100 on three quarters; "
        "with natural gradient it is 4.7 points ahead ([more](ensemble.md#measured))",
    ),
    "Figure 3": Artifact(
        "time by epoch",
        Small(SPEED, beside.figure_3, "ensemble_speed.json", beside.epoch_panels),
        original.normal_jobs,
        f"{LINK}; async SGD, whose server takes turns here, is no faster than sync SGD",
    ),
    "Figure 4": Artifact(
        "a worker that fails and comes back",
        Small(benchmark("ensemble.py", "--faults", data=False), beside.figure_4, "ensemble_faults.json"),
        original.faulty_jobs,
        "EnsembleSync alone, of four islands: an MPI job of sync or async SGD ends with its rank",
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
        "workers sleep as long as a GPU would compute; 16 units instead of 256",
    ),
}

if __name__ == "__main__":
    main("EnsembleSync", ARTIFACTS)
