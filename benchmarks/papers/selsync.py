"""The tables and figures of the SelSync paper.

Tyagi and Swany, Accelerating Distributed ML Training via Selective Synchronization, IEEE CLUSTER 2023.

    python benchmarks/papers/selsync.py --list
    python benchmarks/papers/selsync.py --table 1 --data DATA [--quick] [--json FILE] [--plot FILE]
    python benchmarks/papers/selsync.py --table 1 --kept
    python benchmarks/papers/selsync.py --table 1 --scale paper --data DATA --out FOLDER

DATA is a folder with mnist.h5, which `hpcsgd data convert` writes. Table 1 and figure 1 need root, because
their hosts are network namespaces.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import hpcsgd
from hpcsgd.methods.selsync import gradients
from papers import looks
from papers.artifact import RESULTS, Artifact, Artifacts, Place, Row, Small, main
from papers.beside import selsync as beside
from papers.on_ranks import Training, loaded, trained
from papers.original import selsync as original
from papers.sources import benchmark

IMAGES = 6400
PARTITIONED = benchmark("selsync.py", "--partition")
RATES = RESULTS / "gossip.json"
"""The result from which accuracies are taken; they are not measured again."""
LOOKED = "papers/selsync_looks.json"
SMALL_CNN = "8 workers"
ONE_RANK = "one worker"


def scale_out(place: Place) -> list[Row]:
    """Measure figure 1: the throughput of BSP on more and more hosts, and the accuracy of FedAvg.

    The hosts have slow links. FedAvg trains with all labels on each worker, and with one label per worker.
    """
    rows: list[Row] = []
    for n in (2,) if place.quick else (2, 4):
        timed = benchmark("gossip.py", "--hosts", str(n), "--rounds", "2", "--keep", str(RATES))(place)
        found = {row["who"]: row["seconds_a_step"]["median"] for row in timed if row.get("delay") == 0}
        rows.append({"workers": n, "throughput": n * found["compute only"] / found["AR-SGD"]})
    samples, steps = loaded(place, IMAGES), 40 if place.quick else 400
    for partition in ("IID", "one label"):
        federated = Training(
            "FedAvg (1, 0.1)",
            lambda: hpcsgd.fedavg(per_epoch=10, steps_per_epoch=40),
            workers=10,
            partition=partition,
            steps=steps,
        )
        rows.append(trained(federated, samples))
    return rows


def averaged(place: Place) -> list[Row]:
    """Measure figure 11: BSP, and SelSync that averages parameters or gradients."""
    samples, steps = loaded(place, IMAGES), 40 if place.quick else 800
    rivals = [
        Training("BSP", hpcsgd.bsp, alone=False, partition="SelDP", steps=steps),
        Training("PA", lambda: hpcsgd.selsync(0.25), partition="SelDP", steps=steps),
        Training("GA", lambda: hpcsgd.selsync(0.25, gradients), partition="SelDP", steps=steps),
    ]
    return [trained(each, samples) for each in rivals]


ARTIFACTS: Artifacts = {
    "Table 1": Artifact(
        "SelSync, BSP, FedAvg and SSP: steps, LSSR, accuracy, speed-up",
        Small(benchmark("selsync.py", "--table"), beside.table_1, "selsync_table.json", beside.curve_panels),
        original.table_1_jobs,
        "8 hosts at 1.5 Mbit/s; 0.2 points less than BSP; FedAvg loses nothing",
    ),
    "Figure 1": Artifact(
        "throughput by workers; FedAvg with IID and non-IID data",
        Small(scale_out, beside.figure_1, "papers/selsync_figure_1.json"),
        original.figure_1_jobs,
        "ResNet-20, 10 Mbit/s; FedAvg: 10 workers",
    ),
    "Figure 2": Artifact(
        "time and memory of a step by batch",
        Small(looks.by_batch, beside.figure_2, "papers/selsync_figure_2.json"),
        original.figure_2_jobs,
        "ResNet-8, one core",
    ),
    "Figure 3": Artifact(
        "gradients early and late",
        Small(looks.gradients, beside.figure_3, LOOKED, beside.gradient_panels),
        why=f"{ONE_RANK}; no job files",
    ),
    "Figure 4": Artifact(
        "largest eigenvalue of the Hessian and the gradient's variance",
        Small(looks.gradients, beside.figure_4, LOOKED, beside.curvature_panels),
        why=f"{ONE_RANK}; no job files",
    ),
    "Figure 5": Artifact(
        "Δ and accuracy by step, BSP",
        Small(looks.gradients, beside.figure_5, LOOKED, beside.change_panels),
        original.figure_5_jobs,
        f"{ONE_RANK}; from step 900 on gradients vanish, and Δ is relative to them",
    ),
    "Figure 6": Artifact("thresholds between BSP and local SGD"),
    "Figure 7": Artifact("how DefDP and SelDP divide samples"),
    "Figure 8": Artifact(
        "cost of Δ by window, and of assigning samples",
        Small(looks.dealing, beside.figure_8, "papers/selsync_figure_8.json"),
        original.figure_5_jobs,
        "without norms (0.5 ms more) and reading samples",
    ),
    "Figure 9": Artifact(
        "SelDP and DefDP, gradients averaged, δ = 0.25",
        Small(PARTITIONED, beside.figure_9, "selsync_partition.json"),
        original.figure_9_jobs,
        f"{SMALL_CNN}, δ = 0.5",
    ),
    "Figure 10": Artifact(
        "parameters or gradients averaged, SelDP, δ = 0.25",
        Small(PARTITIONED, beside.figure_10, "selsync_partition.json"),
        original.figure_10_jobs,
        f"{SMALL_CNN}, δ = 0.5",
    ),
    "Figure 11": Artifact(
        "weights by BSP, and with parameters or gradients averaged",
        Small(averaged, beside.figure_11, "papers/selsync_figure_11.json", beside.weight_panels),
        original.figure_11_jobs,
        f"{SMALL_CNN}, first layer",
    ),
    "Figure 12": Artifact(
        "data injection and FedAvg, non-IID data",
        Small(
            benchmark("selsync.py", "--non-iid"),
            beside.figure_12,
            "selsync_non_iid.json",
            beside.curve_panels,
        ),
        original.figure_12_jobs,
        "one label per worker; injections differ by less than 0.2 points",
    ),
}

if __name__ == "__main__":
    main("SelSync", ARTIFACTS)
