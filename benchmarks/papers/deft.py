"""The tables and figures of the DEFT paper.

Yoon and Oh, DEFT: Exploiting Gradient Norm Difference between Model Layers for Scalable Gradient
Sparsification, ICPP 2023.

    python benchmarks/papers/deft.py --list
    python benchmarks/papers/deft.py --figure 4 --data DATA [--quick] [--json FILE] [--plot FILE]
    python benchmarks/papers/deft.py --figure 4 --kept
    python benchmarks/papers/deft.py --figure 4 --scale paper --data DATA --out FOLDER

DATA is a folder with cifar10.h5, wikitext2.h5 and mnist.h5, which `hpcsgd data convert` writes. Figure 7
needs root, because its hosts are network namespaces.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import hpcsgd
from hpcsgd.parts.sparsifiers import Sparsifier
from papers.artifact import Artifact, Artifacts, Place, Row, Small, main
from papers.beside import deft as beside
from papers.on_ranks import Training, loaded, trained
from papers.original import deft as original
from papers.sources import benchmark

DENSITY = 0.1
"""The paper's density for NCF. Our CNN replaces NCF."""
WORKERS = (2, 4, 8, 16)
DENSITIES = (0.1, 0.03, 0.01)
IMAGES = 3200
DENSE_RESULT = "density.json"
SMALL_TASKS = "small models"
SMALL_CNN = "CNN"


def sparse(make: Callable[[float], Sparsifier], density: float) -> Callable[[], hpcsgd.Method]:
    return lambda: hpcsgd.bsp(hpcsgd.Sparse(make(density)))


def all_of(place: Place, rivals: list[tuple[str, Callable[[], hpcsgd.Method], int]], steps: int) -> list[Row]:
    """Train each of `rivals`, with 64 samples per step for any number of workers, and return the rows."""
    samples = loaded(place, IMAGES)
    return [
        trained(
            Training(
                who, method, workers=n, alone=False, batch=max(1, 64 // n), steps=40 if place.quick else steps
            ),
            samples,
        )
        for who, method, n in rivals
    ]


def build_up(place: Place) -> list[Row]:
    """Measure figure 1: Top-k with more and more workers."""
    workers = WORKERS[:2] if place.quick else WORKERS
    rows = all_of(place, [(f"{n} workers", sparse(hpcsgd.TopK, 0.01), n) for n in workers], 200)
    return [row | {"density_set": 0.01} for row in rows]


def as_dense(place: Place) -> list[Row]:
    """Measure figure 6: Top-k, and DEFT at the density that Top-k really has."""
    n = 4 if place.quick else 16
    (topk,) = all_of(place, [(f"Top-k, d = {DENSITY / 10:g}", sparse(hpcsgd.TopK, DENSITY / 10), n)], 400)
    real = beside.last(topk, "density")
    return [topk, *all_of(place, [(f"DEFT, d = {real:.3f}", sparse(hpcsgd.Deft, real), n)], 400)]


def by_density(place: Place) -> list[Row]:
    """Measure figure 8: DEFT at several densities."""
    n = 4 if place.quick else 8
    return all_of(place, [(f"d = {d:g}", sparse(hpcsgd.Deft, d), n) for d in DENSITIES], 4800)


def by_workers(place: Place) -> list[Row]:
    """Measure figure 10: DEFT with more and more workers, and dense training for comparison."""
    workers = WORKERS[:2] if place.quick else WORKERS
    rivals = [(f"{n} workers", sparse(hpcsgd.Deft, DENSITY), n) for n in workers]
    return all_of(place, [("dense", hpcsgd.bsp, workers[-1]), *rivals], 800)


DENSITIES_MEASURED = benchmark("density.py")

ARTIFACTS: Artifacts = {
    "Table 1": Artifact("strengths and weaknesses of sparsifiers", why="words"),
    "Table 2": Artifact("the applications", why="a list"),
    "Figure 1": Artifact(
        "density of Top-k by workers",
        Small(build_up, beside.figure_1, "papers/deft_figure_1.json", beside.note_panels("density")),
        original.figure_1_jobs,
        f"{SMALL_CNN}, d = 0.01",
    ),
    "Figure 2": Artifact("overview of DEFT"),
    "Figure 3": Artifact(
        "convergence of the sparsifiers, 16 workers",
        Small(DENSITIES_MEASURED, beside.figure_3, DENSE_RESULT),
        original.rival_jobs,
        f"{SMALL_TASKS}; accuracies at the end",
    ),
    "Figure 4": Artifact(
        "actual density, 16 workers",
        Small(DENSITIES_MEASURED, beside.figure_4, DENSE_RESULT, beside.of_steps("densities")),
        original.rival_jobs,
        f"{SMALL_TASKS}; an earlier DEFT for the LSTM",
    ),
    "Figure 5": Artifact(
        "error, 16 workers",
        Small(DENSITIES_MEASURED, beside.figure_5, DENSE_RESULT, beside.of_steps("errors")),
        original.rival_jobs,
        SMALL_TASKS,
    ),
    "Figure 6": Artifact(
        "error of DEFT set to Top-k's actual density",
        Small(as_dense, beside.figure_6, "papers/deft_figure_6.json", beside.note_panels("error")),
        original.figure_6_jobs,
        f"16 workers, {SMALL_CNN}",
    ),
    "Figure 7": Artifact(
        "a step by its parts",
        Small(benchmark("sparse_exchange.py", data=False), beside.figure_7, "sparse_exchange.json"),
        original.rival_jobs,
        "ResNet-18, 4 hosts at 100 Mbit/s",
    ),
    "Figure 8": Artifact(
        "convergence by density",
        Small(by_density, beside.figure_8, "papers/deft_figure_8.json", beside.accuracy_panels),
        original.figure_8_jobs,
        f"8 workers, {SMALL_CNN}; 3200 images, all learned by step 1800",
    ),
    "Figure 9": Artifact(
        "speed-up of selection by workers",
        Small(
            benchmark("deft_scaling.py", data=False),
            beside.figure_9,
            "deft_scaling.json",
            beside.speed_panels,
        ),
        original.figure_9_jobs,
        "one thread; our kernel leaves less to gain",
    ),
    "Figure 10": Artifact(
        "convergence by workers",
        Small(by_workers, beside.figure_10, "papers/deft_figure_10.json", beside.accuracy_panels),
        original.figure_10_jobs,
        f"{SMALL_CNN}, d = 0.1",
    ),
}

if __name__ == "__main__":
    main("DEFT", ARTIFACTS)
