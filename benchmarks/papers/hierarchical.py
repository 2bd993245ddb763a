"""The tables and figures of the paper about hierarchical local SGD.

Lee et al., Communication-Efficient Local Stochastic Gradient Descent for Scalable Deep Learning, IEEE Big
Data 2020.

    python benchmarks/papers/hierarchical.py --list
    python benchmarks/papers/hierarchical.py --table 1 --data DATA [--quick] [--json FILE] [--plot FILE]
    python benchmarks/papers/hierarchical.py --table 1 --kept
    python benchmarks/papers/hierarchical.py --table 1 --scale paper --data DATA --out FOLDER

DATA is a folder with cifar10.h5, which `hpcsgd data convert` writes. Figures 5, 6 and 9 to 11 need root,
because their hosts are network namespaces.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from papers.artifact import Artifact, Artifacts, Beside, Place, Row, Small, main
from papers.beside import hierarchical as beside
from papers.curves import at_fixed_rate, classified, sharpened
from papers.original import hierarchical as original
from papers.sources import benchmark

LEARNED, SHARPENED = "papers/hierarchical_learning.json", "papers/hierarchical_edsr.json"
SMALL_MODEL = "ResNet-8 on 5000 images, batches of 16"
TINY = "small EDSR"
SLEEP = "sleeping ranks"


def strong(compared: Callable[..., Beside], figure: str, *, drawn: bool = False) -> Small:
    """Return the measurement of `figure` by strong_scaling.py, whose rows are for figures 5 and 9."""
    panels = partial(beside.scaling_panels, figure=figure) if drawn else None
    measure = benchmark("strong_scaling.py", data=False)
    return Small(measure, partial(compared, figure=figure), "strong_scaling.json", panels)


def fixed(place: Place) -> list[Row]:
    return at_fixed_rate(place, original.INTERVALS, num_syncs=6)


def learn(place: Place) -> list[Row]:
    return classified(place, images=5000, epochs=9)


def sharpen(place: Place) -> list[Row]:
    return sharpened(place, images=800, epochs=24)


ARTIFACTS: Artifacts = {
    "Table 1": Artifact(
        "accuracy by P, CIFAR-10, ResNet-20, I = 8",
        Small(
            benchmark("probe_vs_accuracy.py", "--jobs", "cifar10_small"),
            beside.recorded_accuracy,
            "probe_vs_accuracy.json",
        ),
        original.cifar_jobs,
        "5000 images, 15 epochs: too few updates for P = 4",
    ),
    "Table 2": Artifact(
        "PSNR by P, DIV2K, EDSR, I = 4",
        Small(sharpen, beside.resized, SHARPENED),
        original.edsr_jobs,
        TINY,
    ),
    "Figure 1": Artifact("model averaging of 2 groups of 2"),
    "Figure 2": Artifact(
        "distance D at one rate for all P; I = 2, 4, 8, 16",
        Small(fixed, beside.fixed_rate, "papers/hierarchical_figure_2.json", beside.fixed_panels),
        original.fixed_jobs,
        "ResNet-8, batches of 16; random walks show the same",
    ),
    "Figure 3": Artifact(
        "loss and accuracy by epoch and P",
        Small(learn, beside.learning, LEARNED, beside.learning_panels),
        original.cifar_jobs,
        SMALL_MODEL,
    ),
    "Figure 4": Artifact(
        "distance D with warm-up to 0.1·P",
        Small(
            benchmark("probe_distances.py"),
            beside.warmed_up,
            "probe_distances.json",
            beside.distance_panels,
        ),
        original.cifar_jobs,
        "warm-up of two epochs, not five",
    ),
    "Figure 5": Artifact(
        "epoch time and speed-up, CIFAR-10, P = 4, I = 8",
        strong(beside.scaling, "figure 5", drawn=True),
        original.figure_5_jobs,
        SLEEP,
    ),
    "Figure 6": Artifact(
        "communication of a step, ResNet-20",
        strong(beside.communication, "figure 5"),
        original.figure_5_jobs,
        f"{SLEEP}; exposed communication",
    ),
    "Figure 7": Artifact(
        "loss and PSNR by epoch and P, EDSR",
        Small(sharpen, beside.resized_curves, SHARPENED, beside.resized_panels),
        original.edsr_jobs,
        TINY,
    ),
    "Figure 8": Artifact(
        "distance D by P, EDSR",
        Small(sharpen, beside.resized_distances, SHARPENED, beside.distance_panels),
        original.edsr_jobs,
        TINY,
    ),
    "Figure 9": Artifact(
        "epoch time and speed-up, DIV2K, P = 8, I = 4",
        strong(beside.scaling, "figure 9", drawn=True),
        original.figure_9_jobs,
        SLEEP,
    ),
    "Figure 10": Artifact(
        "communication of a step, EDSR",
        strong(beside.communication, "figure 9"),
        original.figure_9_jobs,
        f"{SLEEP}; exposed communication",
    ),
    "Figure 11": Artifact(
        "synchronous SGD and TensorFlow + Horovod",
        Small(benchmark("strong_scaling.py", data=False), beside.against_ddp, "strong_scaling.json"),
        original.figure_5_jobs,
        f"{SLEEP}; torch's DDP over gloo instead",
    ),
}

if __name__ == "__main__":
    main("hierarchical local SGD", ARTIFACTS)
