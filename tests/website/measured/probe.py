"""Figures in docs/probe.md about its answers and their cost."""

from __future__ import annotations

from hpcsgd.train.growth import MARGIN, THRESHOLD, growths_of, verdict
from probe.virtual import GROUPS
from probe_distances import PROBE, by_way
from probe_vs_accuracy import largest_as_good, means, parted
from website.measured.results import Row, goal, result, rows, table

SYNC_EVERY = 8
"""The interval I of the paper's setting."""
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
    series = by_way(result("probe_distances")["rows"])[PROBE]
    found = verdict(min(series), growths_of(series))
    assert goal("probe_distances", "between the probe's answer and the paper's") == 0
    return (
        f"At the paper's setting (CIFAR-10, ResNet-20) the probe answers {found.P}, "
        f'"not clear between {found.P} and {found.unclear}", and the paper {found.P}.'
    )


def threshold() -> str:
    return f"before ρ drops below {THRESHOLD} (read off the paper's figures)"


def margin() -> str:
    return f"If the quartiles of ρ are within {MARGIN} of the threshold"


def batches() -> int:
    """Return the batches of the probe at the paper's setting: those of the settling, and of each group."""
    found = rows("probe_distances", way=PROBE)
    (settled,) = {each["settled"] for each in found}
    return settled + sum(each["P"] * SYNC_EVERY * len(each["distances"]) for each in found)


def of_the_job() -> float:
    """Return the samples of that probe, in percent of those of 200 epochs of CIFAR-10."""
    return 100 * batches() * 128 / (200 * 50_000)


def cost_at_the_papers_setting() -> str:
    return f"This costs {of_the_job():.1f} % of the samples of 200 epochs."


def cost() -> str:
    mnist, digits = (
        100 * goal("probe_vs_accuracy", f"{job}: samples") for job in ("mnist_cnn", "digits_cnn")
    )
    return f"On small datasets it costs more: {mnist:.0f} % for MNIST, {digits:.0f} % for the digits"
