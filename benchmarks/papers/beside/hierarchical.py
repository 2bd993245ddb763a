"""Results of hierarchical local SGD (Lee et al., IEEE Big Data 2020), compared with ours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from harness import Goal
from papers.artifact import Beside, Row
from papers.curves import flat
from papers.panels import Panel

TABLE_1 = {1: 91.91, 2: 91.61, 4: 91.58, 8: 91.11, 16: 89.28, 32: 85.55}
"""Accuracy in % by P."""
TABLE_2 = {1: 34.35, 2: 34.39, 4: 34.10, 8: 33.89, 16: 30.95}
"""PSNR in dB by P."""
FIGURE_4 = {2: 0.85, 4: 1.95, 8: 3.2}
"""D by P: the middle of the ranges in the text. From P = 8 on, D is flat."""
FIGURE_8 = {2: 0.025, 4: 0.055, 8: 0.10}
"""D by P, also the middle of the ranges. At P = 16 D is "significantly reduced"."""
LAST = 5
"""A PSNR is the median over this number of last epochs."""
GOOD = 0.01
"""Loss of accuracy against P = 1 that still counts as equal. The paper takes half a point of 92."""
SYNC, BASELINE, OURS, DDP = "bsp", "allreduce-based", "hierarchical", "DDP"


def fixed_rate(rows: list[Row]) -> Beside:
    """Compare figure 2, in which D grows up to P = 4 and hardly beyond, for each interval."""
    D = {(row["every"], row["P"]): flat(row) for row in rows}
    intervals, groups = sorted({every for every, _ in D}), sorted({P for _, P in D})
    cells = [
        [every, *(f"{D[every, P]:.3f}" for P in groups), "grows up to P = 4, then hardly"]
        for every in intervals
    ]
    first, most = groups[0], groups[-1]
    at = min(4, most)
    early = max(D[every, first] / D[every, at] for every in intervals)
    late = max(D[every, most] / D[every, at] for every in intervals)
    told = ", ".join(f"{D[intervals[-1], P]:.3f}" for P in groups)
    return Beside(
        ["I", *(f"P = {P}" for P in groups), "the paper"], cells,
        f"I = {intervals[-1]}: D = {told} for P = {', '.join(map(str, groups))}",
        "D grows up to P = 4, then hardly, for I = 2, 4, 8 and 16",
        [Goal(f"D at P = {first} over that at P = {at}, the most of all intervals", early, 0.95),
         Goal(f"D at P = {most} over that at P = {at}, the most of all intervals", late, 1.25)],
    )  # fmt: skip


def fixed_panels(rows: list[Row]) -> list[Panel]:
    return [
        Panel(f"synchronized every {every} steps", "synchronization", "distance D", {
            f"P = {row['P']}": (range(1, len(row["distances"]) + 1), row["distances"])
            for row in rows if row["every"] == every
        })
        for every in sorted({row["every"] for row in rows})
    ]  # fmt: skip


def by_groups(final: dict[int, float], paper: dict[int, float], unit: str, good: float) -> Beside:
    """Compare our final results with table I or II.

    In the paper results are as good as with one group up to some number of groups, and worse with more.
    """
    cells = [[P, f"{value:.2f}", paper.get(P, "")] for P, value in final.items()]
    both = [P for P in final if P in paper]
    few, many = both[min(1, len(both) - 1)], both[-1]
    lost = {P: final[1] - final[P] for P in both}
    over = max(lost[few], 0) / max(lost[many], 1e-9)
    equal = max(P for P in both if paper[1] - paper[P] <= good)
    return Beside(
        ["P", f"ours, {unit}", "the paper"], cells,
        f"{listed((final[P] for P in both), '.2f')} {unit} for P = {', '.join(map(str, both))}",
        f"{listed(paper.values(), '.2f')} {unit}",
        [Goal(f"{unit} that P = {few} is behind P = 1", lost[few], good),
         Goal(f"the same of P = {equal}, which in the paper is as good", lost[equal], good),
         Goal(f"the loss of P = {few} over that of P = {many}", over, 0.5)],
    )  # fmt: skip


def recorded_accuracy(rows: list[Row]) -> Beside:
    """Compare table I with rows of probe_vs_accuracy.py.

    The rows are those of CIFAR-10 if there are any, else those of the first job.
    """
    trained = [row for row in rows if "probes" not in row]
    name = "cifar10_small" if any(row["job"] == "cifar10_small" for row in trained) else trained[0]["job"]
    final = {
        row["P"]: 100 * (row["accuracy"] or 0.0) for row in trained if row["job"] == name and row["seed"] == 1
    }
    return by_groups(final, TABLE_1, "%", 100 * GOOD)


def learning(rows: list[Row]) -> Beside:
    """Compare figure 3, in which loss and accuracy fall behind from P = 8 on."""
    final = {row["P"]: 100 * row["tested"][-1] if row["tested"] else 0.0 for row in rows}
    loss = {row["P"]: row["loss"][-1] for row in rows if row["loss"]}
    few, many = sorted(loss)[0], sorted(loss)[-1]
    beside = by_groups(final, TABLE_1, "%", 100 * 2 * GOOD)
    cells = [[*cell, f"{loss[cell[0]]:.3f}" if cell[0] in loss else "diverged"] for cell in beside.cells]
    goals = [
        Goal(f"training loss of P = {few} over that of P = {many}", loss[few] / loss[many], 0.9),
        *beside.goals,
    ]
    told = f"loss {loss[few]:.2f} at P = {few}, {loss[many]:.2f} at {many}; {beside.ours}"
    return Beside(
        [*beside.head, "our loss"], cells, told, "loss and accuracy fall behind from P = 8 on", goals
    )


def learning_panels(rows: list[Row], label: str = "accuracy of the mean model") -> list[Panel]:
    def of(key: str) -> dict[str, tuple[Sequence[float], Sequence[float]]]:
        return {f"P = {row['P']}": (range(1, len(row[key]) + 1), row[key]) for row in rows}

    return [Panel("", "epoch", "training loss", of("loss")), Panel("", "epoch", label, of("tested"))]


def distances(D: dict[int, float], paper: dict[int, float]) -> Beside:
    """Compare figure 4 or 8, in which D grows in proportion to P at first and less later."""
    growth = {P: D[P] / D[P // 2] / 2 for P in D if P // 2 in D}
    theirs = {P: paper[P] / paper[P // 2] / 2 for P in paper if P // 2 in paper}
    cells = [[P, f"{D[P]:.3f}", f"{growth[P]:.2f}" if P in growth else "", paper.get(P, ""),
              f"{theirs[P]:.2f}" if P in theirs else ""] for P in D]  # fmt: skip
    first, last = min(growth), max(growth)
    goals = [Goal(f"1 over the growth to P = {first}, where 1 is in proportion", 1 / growth[first], 1.25)]
    if last > first:
        goals.append(Goal(f"growth to P = {last} over that to P = {first}", growth[last] / growth[first], 1))
    return Beside(
        ["P", "our D", "growth / 2", "the paper's D", "growth / 2"], cells,
        f"{listed(D.values(), '.3g')} for P = {', '.join(map(str, D))}",
        f"{listed(paper.values(), 'g')} for P = {', '.join(map(str, paper))}, then flat", goals,
    )  # fmt: skip


def listed(values: Iterable[float], form: str) -> str:
    return ", ".join(f"{value:{form}}" for value in values)


def warmed_up(rows: list[Row]) -> Beside:
    """Compare figure 4 with rows of probe_distances.py.

    The rows are those of the whole warm-up if there are any, else those of the probe.
    """
    ways = {row["way"] for row in rows}
    way = "whole warm-up" if "whole warm-up" in ways else "probe"
    mine = sorted((row for row in rows if row["way"] == way and row["distances"]), key=lambda row: row["P"])
    return distances({row["P"]: median(row["distances"][-4:]) for row in mine}, FIGURE_4)


def distance_panels(rows: list[Row]) -> list[Panel]:
    return [Panel("", "synchronization", "D", {
        f"{row.get('way', '')} P = {row['P']}": (range(1, len(row["distances"]) + 1), row["distances"])
        for row in rows
    }, log="y")]  # fmt: skip


def seconds(rows: list[Row], figure: str) -> dict[str, dict[int, Row]]:
    """Return rows by contestant and number of ranks.

    These are the rows of `figure` and those without a figure: the synchronous ones, which belong to all
    figures.
    """
    found: dict[str, dict[int, Row]] = {}
    for row in rows:
        if row["figure"] in ("", figure):
            found.setdefault(row["who"], {})[row["ranks"]] = row
    return found


def scaling(rows: list[Row], figure: str) -> Beside:
    """Compare the speed-ups of figure 5 or 9.

    Synchronous SGD flattens first, then the allreduce-based method, and hierarchical local SGD last.
    """
    of = seconds(rows, figure)
    ranks = sorted({N for each in of.values() for N in each})
    cells = [[who, *(_speed(each.get(N)) for N in ranks)] for who, each in of.items()]
    most = max(of[OURS])
    ours, baseline, sync = (median(of[who][most]["seconds"]) for who in (OURS, BASELINE, SYNC))
    up = {who: of[who][most]["speedup"] or 0.0 for who in (OURS, BASELINE, SYNC)}
    return Beside(
        ["speed-up with ranks", *map(str, ranks)], cells,
        f"{most} ranks: {up[OURS]:.1f} times, {up[BASELINE]:.1f} allreduce-based, {up[SYNC]:.1f} synchronous",
        "flat from 32 (synchronous), 64 (allreduce-based); ours goes on" if figure == "figure 5"
        else "synchronous flat from 64; both local ones go on, ours ahead",
        [Goal(f"{most} ranks: seconds of hierarchical over allreduce-based", ours / baseline, 1),
         Goal(f"{most} ranks: seconds of allreduce-based over synchronous", baseline / sync, 1)],
    )  # fmt: skip


def _speed(row: Row | None) -> str:
    return f"{row['speedup']:.2f}" if row and row["speedup"] else ""


def scaling_panels(rows: list[Row], figure: str) -> list[Panel]:
    of = {who: each for who, each in seconds(rows, figure).items() if who in (SYNC, BASELINE, OURS)}
    times = {who: (list(each), [median(row["seconds"]) for row in each.values()]) for who, each in of.items()}
    ups = {who: (list(each), [row["speedup"] or 0.0 for row in each.values()]) for who, each in of.items()}
    return [
        Panel("", "processes", "seconds a step", times, log="xy"),
        Panel("", "processes", "speed-up", ups, log="xy"),
    ]


def communication(rows: list[Row], figure: str) -> Beside:
    """Compare figure 6 or 10: the seconds of a step in addition to computing.

    The paper's text gives an order, but no numbers.
    """
    of = {who: each for who, each in seconds(rows, figure).items() if who in (SYNC, BASELINE, OURS)}
    beyond = {
        who: {N: median(row["seconds"]) - row["compute"] for N, row in each.items()}
        for who, each in of.items()
    }
    ranks = sorted({N for each in of.values() for N in each})
    cells = [[who, *(f"{each[N]:.3f}" if N in each else "" for N in ranks)] for who, each in beyond.items()]
    most = max(of[OURS])
    sync, baseline, ours = (beyond[who][most] for who in (SYNC, BASELINE, OURS))
    return Beside(
        ["seconds beyond computing, ranks", *map(str, ranks)], cells,
        f"{most} ranks: {sync:.2f} s synchronous, {baseline:.2f} allreduce-based, {ours:.2f} ours",
        "synchronous most, allreduce-based less, ours least",
        [Goal(f"{most} ranks: communication of allreduce-based over synchronous", baseline / sync, 1),
         Goal(f"{most} ranks: communication of hierarchical over allreduce-based", ours / baseline, 1)],
    )  # fmt: skip


def against_ddp(rows: list[Row]) -> Beside:
    """Compare figure 11: our synchronous SGD with that of a well-known framework."""
    of = seconds(rows, "")
    cells = [[N, f"{median(of[SYNC][N]['seconds']):.3f}", f"{median(of[DDP][N]['seconds']):.3f}"]
             for N in sorted(of[DDP])]  # fmt: skip
    most = max(of[DDP])
    over = median(of[SYNC][most]["seconds"]) / median(of[DDP][most]["seconds"])
    at_8 = min(median(of[SYNC][N]["seconds"]) / median(of[DDP][N]["seconds"]) for N in of[DDP])
    return Beside(
        ["ranks", "ours, s a step", "DDP, s a step"], cells,
        f"ours takes {at_8:.2f} of DDP's time at best, {over:.2f} with {most} ranks",
        "ahead of TensorFlow + Horovod from 16 processes on",
        [Goal("seconds of ours over DDP, at best", at_8, 1), Goal(f"the same with {most} ranks", over, 1)],
    )  # fmt: skip


def resized(rows: list[Row]) -> Beside:
    """Compare table II with the median PSNR of the last epochs.

    The learning rate does not fall, so PSNR goes up and down until the end.
    """
    final = {row["P"]: median(row["tested"][-LAST:]) if row["tested"] else 0.0 for row in rows}
    return by_groups(final, TABLE_2, "dB", 0.36)


def resized_curves(rows: list[Row]) -> Beside:
    loss = {row["P"]: row["loss"][-1] for row in rows}
    many = max(loss)
    beside = resized(rows)
    told = f"loss {loss[1]:.4f} at P = 1, {loss[many]:.4f} at {many}; {beside.ours}"
    goals = [Goal(f"training loss of P = 1 over that of P = {many}", loss[1] / loss[many], 1), *beside.goals]
    return Beside(beside.head, beside.cells, told, "loss and PSNR fall behind from P = 16 on", goals)


def resized_distances(rows: list[Row]) -> Beside:
    return distances({row["P"]: flat(row) for row in rows if row["P"] > 1}, FIGURE_8)


def resized_panels(rows: list[Row]) -> list[Panel]:
    return learning_panels(rows, "PSNR of the mean model, dB")
