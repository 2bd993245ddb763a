"""The tables and figures of the paper about stochastic gradient push.

Assran et al., Stochastic Gradient Push for Distributed Deep Learning, ICML 2019. We have the slides of a
talk, in which tables and figures have no numbers. Here they are numbered in the order of the slides.

    python benchmarks/papers/sgp.py --list
    python benchmarks/papers/sgp.py --table 1 --data DATA [--quick] [--json FILE] [--plot FILE]
    python benchmarks/papers/sgp.py --table 1 --kept
    python benchmarks/papers/sgp.py --table 1 --scale paper --data DATA --out FOLDER

DATA is a folder with mnist.h5, which `hpcsgd data convert` writes. Tables 1 to 3 need root, because their
hosts are network namespaces.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import hpcsgd
from papers.artifact import RESULTS, Artifact, Artifacts, Place, Row, Small, main
from papers.beside import sgp as beside
from papers.on_ranks import Training, loaded, trained
from papers.original import sgp as original
from papers.sources import benchmark

WORKERS = 4
METHODS: dict[str, Callable[[], hpcsgd.Method]] = {
    "AR-SGD": hpcsgd.bsp,
    "D-PSGD": hpcsgd.d_psgd,
    "SGP": hpcsgd.sgp,
    "1-OSGP": lambda: hpcsgd.osgp(1),
}
GOSSIP = benchmark("gossip.py", "--rounds", "3")
HOSTS = "ResNet-20"
LIMIT = "faster AR-SGD"
SLOWER_HALF = "AD-PSGD: groups that ask"
SMALL_CNN = "CNN"


def seconds_a_step() -> dict[str, float]:
    """Return the seconds per step of each method, from the last result of gossip.py."""
    return beside.measured(json.loads((RESULTS / "gossip.json").read_text())["rows"])[0]


def taught(place: Place, steps: dict[str, int]) -> list[Row]:
    """Train each method for its number of steps, and return rows that have its seconds per step, too."""
    samples, seconds = loaded(place, 12800), seconds_a_step()
    return [
        trained(
            Training(who, METHODS[who], workers=WORKERS, alone=who != "AR-SGD", batch=32, steps=n), samples
        )
        | {"seconds_a_step": seconds[who]}
        for who, n in steps.items()
    ]


def converging(place: Place) -> list[Row]:
    """Measure figure 4: all methods make the same number of steps."""
    return taught(place, dict.fromkeys(("AR-SGD", "D-PSGD", "SGP"), 40 if place.quick else 400))


def in_equal_time(place: Place) -> list[Row]:
    """Measure table 4: each method makes as many steps as fit in the time of AR-SGD."""
    seconds, base = seconds_a_step(), 40 if place.quick else 200
    rivals = ("AR-SGD", "SGP", "1-OSGP")
    return taught(place, {who: round(base * seconds["AR-SGD"] / seconds[who]) for who in rivals})


ARTIFACTS: Artifacts = {
    "Table 1": Artifact(
        "accuracy and hours by nodes: AR-SGD, D-PSGD, SGP",
        Small(GOSSIP, beside.table_1, "gossip.json"),
        original.table_1_jobs,
        f"{HOSTS}; {LIMIT}",
    ),
    "Table 2": Artifact(
        "topologies: one peer, two, hybrids",
        Small(GOSSIP, beside.table_2, "gossip.json"),
        original.table_2_jobs,
        f"{HOSTS}; {LIMIT}; no 2P/1P-SGP",
    ),
    "Table 3": Artifact(
        "messages that overlap: 1-OSGP",
        Small(GOSSIP, beside.table_3, "gossip.json"),
        original.table_3_jobs,
        f"{HOSTS}; {LIMIT}; {SLOWER_HALF}",
    ),
    "Table 4": Artifact(
        "a fixed budget of time",
        Small(in_equal_time, beside.table_4, "papers/sgp_table_4.json"),
        original.table_4_jobs,
        f"{SMALL_CNN}; step times of table 3; no AD-PSGD",
    ),
    "Figure 1": Artifact("nodes of a network"),
    "Figure 2": Artifact("a directed graph"),
    "Figure 3": Artifact("the exponential graph of 8 nodes"),
    "Figure 4": Artifact(
        "convergence by iterations and by time",
        Small(converging, beside.figure_4, "papers/sgp_figure_4.json", beside.figure_4_panels),
        original.figure_4_jobs,
        f"{SMALL_CNN}; step times of table 1",
    ),
    "Figure 5": Artifact(
        "scaling over Ethernet and InfiniBand",
        Small(
            benchmark("paper_scaling.py", data=False),
            beside.figure_5,
            "paper_scaling.json",
            beside.figure_5_panels,
        ),
        original.table_1_jobs,
        "cost model, Ethernet only",
    ),
}

if __name__ == "__main__":
    main("stochastic gradient push", ARTIFACTS)
