"""Figures of DEFT (Yoon and Oh, ICPP 2023), compared with ours.

Many of the paper's figures are curves without numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import exp

from density.tasks import TASKS
from density.training import CLT_K, DEFT, DENSE, TOP_K
from harness import Goal
from papers.artifact import Beside, Row
from papers.on_ranks import xs
from papers.panels import Panel

FIGURE_4 = {"cifar10": 13.59, "wikitext2": 14.18, "mnist": 5.31}
"""The ratio of Top-k's actual density to the set one with 16 workers (section 5.2), by our task.

The third value is of NCF on MovieLens.
"""
DEFT_DENSITY = 0.1003
"""The actual density of DEFT for NCF when 0.1 was set."""
MODELS = {"cifar10": "ResNet-18", "wikitext2": "LSTM", "mnist": "NCF"}


def cases(rows: list[Row]) -> Mapping[str, Mapping[str, Row]]:
    """Return the rows by task and contestant."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row["task"], {})[row["who"]] = row
    return found


def figure_1(rows: list[Row]) -> Beside:
    """Compare figure 1: the ratio of actual to set density grows with the number of workers."""
    ratio = {row["workers"]: last(row, "density") / row["density_set"] for row in rows}
    few, many = min(ratio), max(ratio)
    return Beside(
        ["workers", "actual over set density, Top-k"],
        [[n, f"{value:.2f}"] for n, value in ratio.items()],
        f"{', '.join(f'{value:.1f}' for value in ratio.values())} times d "
        f"for {', '.join(map(str, ratio))} workers",
        "significantly above the set density, growing with the workers",
        [Goal(f"build-up with {few} workers over that with {many}", ratio[few] / ratio[many], 0.8)],
    )  # fmt: skip


def last(row: Row, note: str) -> float:
    """Return the mean of the metric `note` over the last half of the training."""
    values = row["metrics"][note]
    later = values[len(values) // 2 :]
    return sum(later) / len(later)


def figure_3(rows: list[Row]) -> Beside:
    """Compare figure 3, in which all sparsifiers reach the result of dense training."""
    cells, goals, told = [], [], []
    for task, of in cases(rows).items():
        behind = {who: 100 * (of[DENSE]["accuracy"] - row["accuracy"]) for who, row in of.items()}
        cells += [[TASKS[task].title, who, f"{100 * row['accuracy']:.2f}", f"{behind[who]:.2f}",
                   f"{exp(row['test_loss']):.1f}" if task == "wikitext2" else ""]
                  for who, row in of.items()]  # fmt: skip
        goals += [Goal(f"{TASKS[task].title}: points of {who} behind dense", behind[who], 1.0)
                  for who in (TOP_K, CLT_K, DEFT) if who in of]  # fmt: skip
        told.append(f"{TASKS[task].title} {behind[DEFT]:.1f}")
    return Beside(
        ["task", "who", "accuracy %", "points behind dense", "perplexity"], cells,
        f"points of DEFT behind dense: {'; '.join(told)}",
        "all sparsifiers reach dense training; Top-k soonest",
        goals,
    )  # fmt: skip


def figure_4(rows: list[Row]) -> Beside:
    of = cases(rows)
    cells = [[TASKS[task].title, who, f"{each['ratio']:.2f}", theirs(task, who)]
             for task, those in of.items() for who, each in those.items() if who != DENSE]  # fmt: skip
    goals = []
    for task, those in of.items():
        goals += [Goal(f"{TASKS[task].title}: half the paper's build-up of Top-k over ours",
                       FIGURE_4[task] / 2 / those[TOP_K]["ratio"], 1),
                  *(Goal(f"{TASKS[task].title}: {who}'s density off the set one", off(those[who]), 0.05)
                    for who in (DEFT, CLT_K))]  # fmt: skip
    return Beside(
        ["task", "who", "actual over set density", "the paper"], cells,
        f"Top-k {several(of, TOP_K)} times d; DEFT {several(of, DEFT)}; CLT-k {several(of, CLT_K)}",
        f"Top-k {', '.join(map(str, FIGURE_4.values()))}; DEFT and CLT-k 1", goals,
    )  # fmt: skip


def off(row: Row) -> float:
    return abs(row["ratio"] - 1)


def several(of: Mapping[str, Mapping[str, Row]], who: str) -> str:
    return ", ".join(f"{those[who]['ratio']:.2f}" for those in of.values())


def theirs(task: str, who: str) -> object:
    return FIGURE_4[task] if who == TOP_K else 1 if who in (DEFT, CLT_K) else ""


def figure_5(rows: list[Row]) -> Beside:
    of = cases(rows)
    errors = {(task, who): of[task][who]["error"] for task in of for who in (TOP_K, CLT_K, DEFT)}
    return Beside(
        ["task", "who", "‖e‖ at the end"],
        [[TASKS[task].title, who, f"{value:.3g}"] for (task, who), value in errors.items()],
        "; ".join(f"{TASKS[t].title}: Top-k {errors[t, TOP_K]:.2g}, DEFT {errors[t, DEFT]:.2g}" for t in of),
        "Top-k's far below those of DEFT and CLT-k, which are alike",
        [goal for t in of for goal in (
            Goal(f"{TASKS[t].title}: error of Top-k over DEFT's", errors[t, TOP_K] / errors[t, DEFT], 0.5),
            Goal(f"{TASKS[t].title}: error of DEFT over CLT-k's", errors[t, DEFT] / errors[t, CLT_K], 1.5),
        )],
    )  # fmt: skip


def of_steps(key: str) -> Callable[[list[Row]], list[Panel]]:
    """Return a function that makes one panel per task, with the curves `key`."""

    def panels(rows: list[Row]) -> list[Panel]:
        return [
            Panel(TASKS[task].title, "step", key, {
                who: (xs(row, row[key]), row[key]) for who, row in of.items() if who != DENSE
            }, log="y")
            for task, of in cases(rows).items()
        ]  # fmt: skip

    return panels


def figure_6(rows: list[Row]) -> Beside:
    """Compare figure 6: Top-k, and DEFT at about the actual density of Top-k."""
    topk, deft = (next(row for row in rows if row["who"].startswith(who)) for who in ("Top-k", "DEFT"))
    density, error = ([last(row, note) for row in (topk, deft)] for note in ("density", "error"))
    return Beside(
        ["who", "actual density", "‖e‖ in the last half"],
        [[row["who"], f"{last(row, 'density'):.3f}", f"{last(row, 'error'):.3g}"] for row in rows],
        f"densities {density[0]:.3f} (Top-k) and {density[1]:.3f} (DEFT), "
        f"errors {error[0]:.2g} and {error[1]:.2g}",
        "at comparable densities errors are alike",
        [Goal("error of DEFT over that of Top-k", error[1] / error[0], 2)],
    )  # fmt: skip


def note_panels(note: str) -> Callable[[list[Row]], list[Panel]]:
    def panels(rows: list[Row]) -> list[Panel]:
        lines = {row["who"]: (xs(row, row["metrics"][note]), row["metrics"][note]) for row in rows}
        return [Panel("", "step", note, lines, log="y")]

    return panels


def figure_7(rows: list[Row]) -> Beside:
    parts = {row["who"]: row["parts"] for row in rows}
    names = [name for name in ("compute", "share", "select", "indices", "values") if name in parts[DEFT]]
    told = {who: parts[who].get("indices", 0) + parts[who].get("values", 0) for who in (TOP_K, CLT_K, DEFT)}
    picked = {who: parts[who]["select"] for who in (TOP_K, CLT_K, DEFT)}
    return Beside(
        ["who, ms a step", *names],
        [[who, *(f"{1e3 * parts[who].get(name, 0):.1f}" for name in names)] for who in (TOP_K, CLT_K, DEFT)],
        f"ms of selecting {listed(picked)}, of communicating {listed(told)} (Top-k, CLT-k, DEFT)",
        "DEFT selects in far less time than both, and communicates in less",
        [Goal(f"{what} of DEFT over that of {who}", of[DEFT] / of[who], 1)
         for what, of in (("selecting", picked), ("communicating", told)) for who in (TOP_K, CLT_K)],
    )  # fmt: skip


def listed(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{1e3 * value:.0f}" for value in seconds.values())


def reached(rows: list[Row], papers: str, points: float) -> Beside:
    """Compare figure 8 or 10: training reaches the same accuracy with any density or number of workers."""
    final = {row["who"]: 100 * row["accuracy"] for row in rows}
    best, worst = max(final.values()), min(final.values())
    return Beside(
        ["who", "accuracy %"], [[who, f"{value:.2f}"] for who, value in final.items()],
        "; ".join(f"{who} {value:.1f} %" for who, value in final.items()), papers,
        [Goal("points between the best and the worst", best - worst, points)],
    )  # fmt: skip


def figure_8(rows: list[Row]) -> Beside:
    return reached(rows, "a little slower with the least density, no difference from epoch 45 on", 1.0)


def figure_10(rows: list[Row]) -> Beside:
    return reached(rows, "rates differ, all come to dense training's perplexity", 1.0)


def accuracy_panels(rows: list[Row]) -> list[Panel]:
    lines = {row["who"]: ([t for t, _ in row["tested"]], [a for _, a in row["tested"]]) for row in rows}
    return [Panel("", "step", "accuracy", lines)]


def figure_9(rows: list[Row]) -> Beside:
    of = {(row["task"], row["select"], row["n"]): row["speed_up"] for row in rows}
    tasks, workers = (list(dict.fromkeys(row[key] for row in rows)) for key in ("task", "n"))
    n = 16 if 16 in workers else workers[-1]
    cells = [[task, by, *(f"{of[task, by, m]:.1f}" for m in workers)]
             for task in tasks for by in ("torch.topk", "kernel")]  # fmt: skip
    told = {by: ", ".join(f"{of[task, by, n]:.1f}" for task in tasks) for by in ("torch.topk", "kernel")}
    return Beside(
        ["task", "by", *map(str, workers)], cells,
        f"{n} workers: {told['torch.topk']} by torch.topk, {told['kernel']} by our kernel",
        "above linear, the more so the more workers",
        [Goal(f"{task}, {by}: {n} over the speed-up", n / of[task, by, n], 1)
         for task in tasks for by in ("torch.topk", "kernel")],
    )  # fmt: skip


def speed_panels(rows: list[Row]) -> list[Panel]:
    return [
        Panel(task, "workers", "selection: Top-k over DEFT", {
            by: ([r["n"] for r in mine], [r["speed_up"] for r in mine])
            for by in ("torch.topk", "kernel")
            for mine in [[r for r in rows if r["task"] == task and r["select"] == by]]
        } | {"linear": ([1, 64], [1, 64])}, log="xy")
        for task in dict.fromkeys(row["task"] for row in rows)
    ]  # fmt: skip
