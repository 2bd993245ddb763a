"""Figures in docs/late.md about time and accuracy, and the goals in benchmarks/README.md."""

from __future__ import annotations

from statistics import mean, median, stdev

from late_accuracy.judging import behind, figures
from late_accuracy.tasks import TASKS
from late_accuracy.training import PLAIN
from website.measured.results import Row, from_to, over, result, row, rows, signed, table

LINKS = ("1gbit", "100mbit")
SPEED = {
    "computing alone": "compute alone",
    "DDP, 1 MB": "DDP 1 MB",
    "`bsp`": "bsp",
    "`hierarchical(8)`": "hierarchical(8)",
    "`delayed(hierarchical(8), 8)`": "delayed(8)",
    "`streaming(hierarchical(8), 4, 2)`": "streamed(8)",
}
HIDING = ("delayed(8)", "streamed(8)")
NAMES, HOW = ("ResNet-20", "LSTM"), ("delayed", "streamed", "bits")
ACCURACY = {
    "`delayed(…, 1)`": "delayed 1",
    "`delayed(…, 4)`": "delayed 4",
    "`streaming(…, 4, 2)`": "streamed",
    "averages in 8 bits": "8 bits",
    "averages in 4 bits": "4 bits",
}


def seconds(who: str, rate: str, model: str = "6 M") -> float:
    return median(row("step_time", who=who, rate=rate, model=model)["seconds"])


def speed() -> str:
    lines = []
    for name, who in SPEED.items():
        cells = []
        for rate in LINKS:
            found = row("step_time", who=who, rate=rate, model="6 M")
            assert found["against"] == "DDP 1 MB"
            cells += [f"{median(found['seconds']):.3f}", over(found["ratio"]["median"])]
        lines.append([name, *cells])
    return table(lines)


def longer(rates: tuple[str, ...], model: str) -> str:
    """Return by how many percent delayed steps take longer than computing alone."""
    return from_to(
        100 * (seconds(who, rate, model) / seconds("compute alone", rate, model) - 1)
        for rate in rates
        for who in HIDING
    )


def computing() -> str:
    (both,) = {f"{seconds('compute alone', rate):.2f}" for rate in LINKS}
    return f"6.0 million parameters; ranks sleep {both} s instead of computing"


def beyond_computing() -> str:
    return f"Delayed steps take {longer(LINKS, '6 M')} % longer than computing alone."


def beyond_computing_25_million() -> str:
    return f"With 25 million parameters at 1 Gbit/s it is {longer(('1gbit',), '25 M')} % ("


def difference(who: str, task: str) -> str:
    """Return how far a method is behind `hierarchical`, with the standard error."""
    of = {each: figures(rows("late_accuracy", task=task, who=each), TASKS[task]) for each in (who, PLAIN)}
    apart, digits = behind(of[who], of[PLAIN], TASKS[task]), 4 if TASKS[task].by_loss else 2
    error = stdev(apart) / len(apart) ** 0.5
    told = signed(mean(apart), digits)
    return told if TASKS[task].by_loss and "bits" in who else f"{told} ± {error:.{digits}f}"


def accuracy() -> str:
    return table([name, *(difference(who, task) for task in TASKS)] for name, who in ACCURACY.items())


def plain() -> str:
    points, loss = (mean(figures(rows("late_accuracy", task=t, who=PLAIN), TASKS[t]).values()) for t in TASKS)
    return (
        f"points below `hierarchical(8)` ({points:.1f} %) | LSTM on characters: loss over that of "
        f"`hierarchical(8)` ({loss:.3f})"
    )


def goals() -> str:
    found = result("late_accuracy")["goals"]
    missed = {(task, how) for task in NAMES for how in HOW if any_missed(found, task, how)}
    assert missed == {("ResNet-20", "delayed"), ("ResNet-20", "streamed"), ("LSTM", "streamed")}
    (points,), (loss,) = ({each["goal"] for each in found if each["name"].startswith(task)} for task in NAMES)
    return (
        f"Goals: {points} points and {100 * (loss - 1):.1f} % of the loss (missed by delays and "
        "streaming on ResNet-20, and by streaming on the LSTM)."
    )


def any_missed(goals: list[Row], task: str, how: str) -> bool:
    return any(not each["met"] for each in goals if each["name"].startswith(task) and how in each["name"])


def steps() -> str:
    ((count, groups),) = {(each["steps"], each["groups"]) for each in rows("late_accuracy")}
    assert (groups, len(rows("late_accuracy", task="cifar10", who=PLAIN))) == (4, 3)
    return (
        f"Four groups that average every 8 steps, {count} steps from the same weights on the same samples, "
        "three seeds"
    )
