"""Figures in docs/probe.md about its answers and their cost."""

from __future__ import annotations

from probe.virtual import GROUPS
from probe_distances import PROBE, answer, by_way
from probe_vs_accuracy import largest_as_good, means, parted
from website.measured.results import Row, goal, result, table

JOBS = {
    "digits, CNN, 30 epochs": "digits_cnn",
    "MNIST, CNN, 4 epochs": "mnist_cnn",
    "5000 images of CIFAR-10, ResNet-20, 15 epochs": "cifar10_small",
}


def answered(probed: Row) -> str:
    return str(probed["P"]) + (f", not clear to {probed['unclear']}" if probed["unclear"] else "")


def answers() -> str:
    lines = []
    for name, job in JOBS.items():
        (probed,), trained = parted(result("probe_vs_accuracy")["rows"], [job])
        accuracies = means(trained)
        lines.append(
            [name, *(f"{accuracies[P]:.3f}" for P in GROUPS), answered(probed), largest_as_good(trained)]
        )
    return table(lines)


def at_the_papers_setting() -> str:
    found = answer(by_way(result("probe_distances")["rows"])[PROBE])
    return f"At the paper's setting (CIFAR-10, ResNet-20) the probe answers {found},"


def cost() -> str:
    mnist, digits = (
        100 * goal("probe_vs_accuracy", f"{job}: samples") for job in ("mnist_cnn", "digits_cnn")
    )
    return f"On small datasets it costs more: {mnist:.0f} % for MNIST, {digits:.0f} % for the digits"
