"""Results of SelSync (Tyagi and Swany, IEEE CLUSTER 2023), compared with ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import mean
from typing import Any

import numpy as np

from harness import Goal
from papers.artifact import Beside, Row
from papers.on_ranks import xs
from papers.panels import Panel
from selsync import table

TABLE_1 = {
    "ResNet101": {"BSP": 98.5, "FedAvg": 98.6, "SSP": 93.8, "SelSync": 98.62, "speed-up": 2.03},
    "VGG11": {"BSP": 90.9, "FedAvg": 88.2, "SSP": 68.78, "SelSync": 91.33, "speed-up": 13.75},
    "AlexNet": {"BSP": 85.15, "FedAvg": 78.2, "SSP": 86.52, "SelSync": 86.72, "speed-up": 4.63},
    "Transformer (perplexity)": {
        "BSP": 90.02,
        "FedAvg": 89.96,
        "SSP": 89.98,
        "SelSync": 89.91,
        "speed-up": 2.42,
    },
}
"""The best of each method's settings. All settings of VGG11 are in benchmarks/selsync/table.py."""
FIGURE_8A = {"ResNet101": (17, 26), "VGG11": (3.1, 6.5), "AlexNet": (3.9, 7.0), "Transformer": (2.3, 6.4)}
"""Milliseconds of Δ with windows of 25 and 200 steps. The last three follow from increases in the text."""
FIGURE_9 = {"ResNet101": (97.6, 96.8), "VGG11": (90.86, 64.1), "AlexNet": (81.1, 61.2)}
"""Accuracy in % with SelDP and with DefDP, when gradients are averaged."""
FIGURE_10 = {"ResNet101": (98.52, 96.8), "VGG11": (91.42, 90.86)}
"""Accuracy in % when parameters and when gradients are averaged, with SelDP."""
FIGURE_12 = {"FedAvg": "60–70 %", "VGG11": "70 %"}
HOST_LINK = "10 Mbit/s"


def table_1(rows: list[Row]) -> Beside:
    bsp = rows[0]
    ours = [row for row in rows if "SelSync" in row["who"]]
    best, fastest = max(ours, key=lambda row: row["accuracy"]), max(ours, key=lambda row: row["speed"])
    goals = table.goals(rows)
    behind = {name: [row["accuracy"] for row in rows if name in row["who"]] for name in ("FedAvg", "SSP")}
    goals += [Goal(f"best accuracy of {name} over BSP's", max(found) / bsp["accuracy"], 1)
              for name, found in behind.items() if found]  # fmt: skip
    vgg = TABLE_1["VGG11"]
    return Beside(
        table.HEAD.split(","), [table.cells(row, bsp) for row in rows],
        f"SelSync {100 * best['accuracy']:.2f} %, BSP {100 * bsp['accuracy']:.2f}, up to "
        f"{fastest['speed']:.2f} times as fast",
        f"VGG11: {vgg['SelSync']} and {vgg['BSP']} %, up to {vgg['speed-up']} times; "
        "ResNet101 2.03, AlexNet 4.63, Transformer 2.42", goals,
    )  # fmt: skip


def two(
    rows: list[Row], of: Callable[[Row], str], names: tuple[str, str], paper: dict[str, tuple[float, float]]
) -> Beside:
    """Compare the mean accuracies of two variants, the first of which is ahead in the paper.

    `of` returns the variant to which a row belongs.
    """
    score = {name: mean(100 * row["accuracy"] for row in rows if of(row) == name) for name in names}
    first, second = names
    cells = [["ours", *(f"{score[name]:.2f}" for name in names)]]
    cells += [[f"the paper, {model}", *map(str, both)] for model, both in paper.items()]
    told = "; ".join(f"{model} {a} and {b}" for model, (a, b) in paper.items())
    return Beside(
        ["accuracy %", *names], cells,
        f"{score[first]:.2f} and {score[second]:.2f} % ({first}, {second})", told,
        [Goal(f"accuracy with {second} over that with {first}", score[second] / score[first], 1)],
    )  # fmt: skip


def figure_9(rows: list[Row]) -> Beside:
    names = {"seldp": "SelDP", "defdp": "DefDP"}
    mine = [row for row in rows if row["aggregate"] == "gradients"]
    return two(mine, lambda row: names[row["partition"]], ("SelDP", "DefDP"), FIGURE_9)


def figure_10(rows: list[Row]) -> Beside:
    mine = [row for row in rows if row["partition"] == "seldp"]
    return two(mine, lambda row: row["aggregate"], ("parameters", "gradients"), FIGURE_10)


def figure_12(rows: list[Row]) -> Beside:
    score = {row["who"]: 100 * row["accuracy"] for row in rows}
    without = "SelSync δ = 0.3"
    shared = {who: value for who, value in score.items() if "0." in who and "(0." in who}
    fed = next(value for who, value in score.items() if "FedAvg" in who)
    return Beside(
        ["who", "LSSR", "our accuracy %", "the paper"],
        [[row["who"], f"{row['lssr']:.3f}", f"{100 * row['accuracy']:.2f}",
          "60–70 (ResNet101), 70 (VGG11)" if "FedAvg" in row["who"] else ""] for row in rows],
        f"FedAvg {fed:.1f} %; injection {', '.join(f'{value:.1f}' for value in shared.values())} %; "
        f"without {score[without]:.1f} %",
        "FedAvg 60–70 % (ResNet101), 70 % (VGG11); injection ahead, the more the better",
        [Goal("accuracy of FedAvg over the worst with injection", fed / min(shared.values()), 1),
         Goal("accuracy of (0.5, 0.5, 0.05) over that of (0.75, 0.75, 0.3)",
              shared["SelSync (0.5, 0.5, 0.05)"] / shared["SelSync (0.75, 0.75, 0.3)"], 1)],
    )  # fmt: skip


def curve_panels(rows: list[Row]) -> list[Panel]:
    """Return a panel of accuracy against steps, from the evaluations of `hpcsgd train`."""
    return [Panel("", "step", "accuracy of the mean model", {
        row["who"]: ([t for t, *_ in row["curve"]], [a for *_, a in row["curve"]]) for row in rows
    })]  # fmt: skip


def figure_1(rows: list[Row]) -> Beside:
    rate = {row["workers"]: row["throughput"] for row in rows if "throughput" in row}
    fed = {row["partition"]: 100 * row["accuracy"] for row in rows if "accuracy" in row}
    most = max(rate)
    cells = [[f"throughput of {n} workers over one", f"{value:.2f}", ""] for n, value in rate.items()]
    cells += [[f"FedAvg, {name}, accuracy %", f"{value:.2f}", ""] for name, value in fed.items()]
    return Beside(
        ["", "ours", "the paper"], cells,
        f"{most} workers {rate[most]:.2f} times one; FedAvg {fed['IID']:.1f} % IID, "
        f"{fed['one label']:.1f} % with one label a worker",
        "16 workers about 3 times one (ResNet101); FedAvg far worse with one label a worker",
        [Goal(f"throughput of {most} workers over {most} times one", rate[most] / most, 0.5),
         Goal("accuracy of FedAvg with one label over IID", fed["one label"] / fed["IID"], 0.98)],
    )  # fmt: skip


def figure_2(rows: list[Row]) -> Beside:
    first, last = rows[0], rows[-1]
    times, memory = last["seconds"] / first["seconds"], last["bytes"] / first["bytes"]
    larger = last["batch"] / first["batch"]
    return Beside(
        ["batch", "ms a step", "MB for the backward pass"],
        [[row["batch"], f"{1e3 * row['seconds']:.1f}", f"{row['bytes'] / 1e6:.1f}"] for row in rows],
        f"a batch {larger:g} times as large: {times:.1f} times as long, {memory:.1f} times the memory",
        "both grow with the batch on a K80",
        [Goal("1 over the growth of time", 1 / times, 0.5),
         Goal("1 over the growth of memory", 1 / memory, 0.5)],
    )  # fmt: skip


def ends(rows: list[Row]) -> tuple[Row, Row]:
    return rows[0], rows[-1]


def width(row: Row) -> float:
    """Return the distance between the 6 % and the 94 % quantile."""
    return row["quantiles"][-2] - row["quantiles"][1]


def figure_3(rows: list[Row]) -> Beside:
    early, late = max(rows[: max(1, len(rows) // 10)], key=width), rows[-1]
    return Beside(
        ["step", "gradient of the first layer, 6 to 94 %", "the paper"],
        [[row["step"], f"{row['quantiles'][1]:.4f} to {row['quantiles'][-2]:.4f}", note]
         for row, note in ((early, "wide at epoch 1"), (late, "narrow at epoch 50 (4)"))],
        f"{width(early):.3f} wide in step {early['step']}, {width(late):.3f} in step {late['step']}",
        "wide at epoch 1, narrow at epoch 50 (ResNet101) or 4 (Transformer)",
        [Goal("width at the end over that at the beginning", width(late) / width(early), 0.5)],
    )  # fmt: skip


def gradient_panels(rows: list[Row]) -> list[Panel]:
    parts = np.linspace(0.01, 0.99, 21).tolist()
    early, late = ends(rows)
    lines = {f"step {row['step']}": (row["quantiles"], parts) for row in (early, late)}
    return [Panel("", "gradient of the first layer", "part below", lines)]


def figure_4(rows: list[Row]) -> Beside:
    pairs = np.log([[max(row["eigenvalue"], 1e-9), row["norm"]] for row in rows])
    together = float(np.corrcoef(pairs.T)[0, 1])
    return Beside(
        ["step", "largest eigenvalue", "‖g‖²"],
        [[row["step"], f"{row['eigenvalue']:.3g}", f"{row['norm']:.3g}"]
         for row in rows[:: max(1, len(rows) // 8)]],
        f"logarithms of both correlate by {together:.2f}", "the one follows the other",
        [Goal("1 minus their correlation", 1 - together, 0.5)],
    )  # fmt: skip


def curvature_panels(rows: list[Row]) -> list[Panel]:
    steps = [row["step"] for row in rows]
    lines = {"largest eigenvalue": "eigenvalue", "‖g‖²": "norm"}
    return [
        Panel(
            "",
            "step",
            "",
            {name: (steps, [row[key] for row in rows]) for name, key in lines.items()},
            log="y",
        )
    ]


def figure_5(rows: list[Row]) -> Beside:
    third = max(1, len(rows) // 3)
    early, late = mean(row["delta"] for row in rows[:third]), mean(row["delta"] for row in rows[-third:])
    thirds = rows[:third], rows[-third:]
    first, last = (100 * (part[-1]["accuracy"] - part[0]["accuracy"]) for part in thirds)
    return Beside(
        ["steps", "mean Δ", "accuracy gained, points"],
        [["first third", f"{early:.4f}", f"{first:.1f}"], ["last third", f"{late:.4f}", f"{last:.1f}"]],
        f"Δ {early:.3f} while accuracy gains {first:.1f} points, {late:.3f} while it gains {last:.1f}",
        "Δ is large while accuracy changes, and flat as it is",
        [Goal("Δ of the last third over that of the first", late / early, 1)],
    )  # fmt: skip


def change_panels(rows: list[Row]) -> list[Panel]:
    steps = [row["step"] for row in rows]
    return [Panel("", "step", name, {"": (steps, [row[key] for row in rows])})
            for name, key in (("Δ", "delta"), ("test accuracy", "accuracy"))]  # fmt: skip


def figure_8(rows: list[Row]) -> Beside:
    of = {(row["who"], row["what"]): 1e3 * row["seconds"] for row in rows}
    windows = [what for who, what in of if who == "Δ"]
    grown = of["Δ", windows[-1]] / of["Δ", windows[0]]
    sets = [what for who, what in of if who == "SelDP"]
    cells = [[f"Δ, {name}", f"{of['Δ', name]:.3f}", "2.3 to 17 (25), 6.4 to 26 (200)"] for name in windows]
    theirs = {name: "nearly the same" if "CIFAR" in name else "SelDP seconds more" for name in sets}
    cells += [[f"{who}, {name}", f"{of[who, name]:.2f}", theirs[name]]
              for name in sets for who in ("SelDP", "DefDP")]  # fmt: skip
    longer = max(of["SelDP", name] / of["DefDP", name] for name in sets)
    return Beside(
        ["what", "ours, ms", "the paper, ms"], cells,
        f"Δ {of['Δ', windows[0]]:.2f} ms with {windows[0]}, {grown:.1f} times that with {windows[-1]}; SelDP "
        f"{of['SelDP', sets[-1]]:.0f} ms, DefDP {of['DefDP', sets[-1]]:.0f} ({sets[-1]})",
        "Δ 2.3 to 17 ms with window 25, up to 2.8 times that with 200; SelDP some seconds longer",
        [Goal("1 over the growth of Δ with the window", 1 / grown, 1),
         Goal("ms of Δ with the largest window over the paper's least", of["Δ", windows[-1]] / 6.4, 1),
         Goal("SelDP over DefDP", longer, 2)],
    )  # fmt: skip


def apart(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the mean absolute difference of quantiles."""
    return mean(abs(x - y) for x, y in zip(a, b, strict=True))


def figure_11(rows: list[Row]) -> Beside:
    weights: dict[str, dict[str, Any]] = {row["who"]: row["weights"] for row in rows}
    steps = list(weights["BSP"])
    middle, last = steps[len(steps) // 2 - 1], steps[-1]
    off = {
        (who, t): apart(weights[who][t], weights["BSP"][t]) for who in ("PA", "GA") for t in (middle, last)
    }
    return Beside(
        ["quantiles of the first layer's weights, from BSP's", f"step {middle}", f"step {last}"],
        [[who, *(f"{off[who, t]:.4f}" for t in (middle, last))] for who in ("PA", "GA")],
        f"PA {off['PA', last]:.4f} from BSP, GA {off['GA', last]:.4f} at the end",
        "PA as BSP, GA unlike both",
        [Goal(f"PA's distance from BSP over GA's, step {t}", off["PA", t] / off["GA", t], 1)
         for t in (middle, last)],
    )  # fmt: skip


def weight_panels(rows: list[Row]) -> list[Panel]:
    parts = np.linspace(0.01, 0.99, 21).tolist()
    last = list(rows[0]["weights"])[-1]
    lines = {row["who"]: (row["weights"][last], parts) for row in rows}
    return [Panel(f"step {last}", "weight of the first layer", "part below", lines)]


def loss_panels(rows: list[Row]) -> list[Panel]:
    return [
        Panel(
            "", "step", "training loss", {row["who"]: (xs(row, row["losses"]), row["losses"]) for row in rows}
        )
    ]
