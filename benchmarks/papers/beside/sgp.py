"""Tables of stochastic gradient push (Assran et al., ICML 2019, from the slides), compared with ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean

from harness import Goal
from papers.artifact import Beside, Row
from papers.on_ranks import xs
from papers.panels import Panel

TABLE_1 = {
    "AR-SGD": {4: 22.0, 8: 14.0, 16: 8.5, 32: 5.1},
    "D-PSGD": {4: 19.7, 8: 9.7, 16: 5.0, 32: 2.6},
    "SGP": {4: 11.8, 8: 5.9, 16: 3.2, 32: 1.7},
}
"""Hours by number of nodes. SGP's accuracies were 76.3, 76.4, 75.9 and 75.0 %."""
TABLE_2 = {"AR-SGD": 8.5, "2P-SGP": 5.1, "SGP": 3.2, "AR/1P-SGP": 4.8, "2P/1P-SGP": 3.5}
"""Hours on 16 nodes. The paper's 1P-SGP is called SGP here."""
TABLE_3 = {
    "AR-SGD": (76.3, 8.5), "D-PSGD": (75.9, 4.9), "AD-PSGD": (75.5, 2.9), "SGP": (75.9, 3.2),
    "1-OSGP": (75.7, 1.8),
}  # fmt: skip
"""Validation accuracy in %, and hours, on 16 nodes."""
TABLE_4 = {"AR-SGD": (76.2, 5.1), "AD-PSGD": (76.9, 4.7), "SGP": (77.1, 4.6), "1-OSGP": (77.1, 2.7)}
"""Validation accuracy in %, and hours, on 32 nodes: 90 epochs of AR-SGD, 270 of the others."""
POINTS = 0.5
DOUBLING = "AR-SGD by doubling"
"""The contestant of gossip.py whose allreduce is of the paper's kind."""


def measured(rows: list[Row]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds per step without a straggler and the accuracies in %, from rows of gossip.py."""
    seconds = {row["who"]: row["seconds_a_step"]["median"] for row in rows if row.get("delay") == 0}
    found: dict[str, list[float]] = {}
    for row in rows:
        if "accuracy" in row:
            found.setdefault(row["who"], []).append(100 * row["accuracy"])
    return seconds, {who: mean(values) for who, values in found.items()}


def rates(rows: list[Row], base: str) -> dict[str, float]:
    """Return the rates over `base` without a straggler: the medians of the rounds' ratios.

    `base` is the end of a key of the rows of gossip.py: "AR" or "doubling".
    """
    return {row["who"]: row[f"rate_over_{base}"]["median"] for row in rows if row.get("delay") == 0}


def compared(
    rows: list[Row], paper: Mapping[str, float], order: Sequence[tuple[str, str]], scores: str
) -> Beside:
    """Compare our rates with the paper's. All are relative to the rate of AR-SGD.

    Our rates are relative to our AR-SGD, and also to AR-SGD of the paper's kind. `paper` has the hours of the
    paper. `order` has pairs of methods, the first of which must be faster. `scores` is added to the text
    about the paper.
    """
    seconds, accuracy = measured(rows)
    who = [name for name in paper if name in seconds or name in accuracy]
    rate, over = (
        {name: found[name] for name in who if name in found}
        for found in (rates(rows, "AR"), rates(rows, "doubling"))
    )
    scored = [accuracy[name] for name in who if name in accuracy]
    theirs = {name: paper["AR-SGD"] / paper[name] for name in paper}
    goals = [Goal(f"seconds of {a} over {b}", seconds[a] / seconds[b], 1)
             for a, b in order if a in seconds and b in seconds]  # fmt: skip
    goals += [Goal(f"points of {name} behind AR-SGD", accuracy["AR-SGD"] - accuracy[name], POINTS)
              for name in who if name in accuracy and name != "AR-SGD"]  # fmt: skip
    return Beside(
        ["who", "s a step", "rate over AR-SGD", "by doubling", "the paper's rate", "accuracy %"],
        [[name, f"{seconds[name]:.2f}" if name in seconds else "",
          f"{rate[name]:.2f}" if name in rate else "", f"{over[name]:.2f}" if name in over else "",
          f"{theirs[name]:.2f}",
          f"{accuracy[name]:.2f}" if name in accuracy else ""] for name in who],
        f"rates over AR-SGD: {told({name: rate[name] for name in rate if name != 'AR-SGD'})}; "
        f"over {DOUBLING}: {told({name: over[name] for name in over if name != 'AR-SGD'})}; "
        f"accuracies {min(scored):.2f} to {max(scored):.2f} %",
        f"rates {told({name: value for name, value in theirs.items() if name != 'AR-SGD'})}{scores}", goals,
    )  # fmt: skip


def told(rates: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in rates.items())


def table_1(rows: list[Row]) -> Beside:
    paper = {name: hours[16] for name, hours in TABLE_1.items()}
    order = [("SGP", "AR-SGD"), ("SGP", "D-PSGD"), ("D-PSGD", "AR-SGD")]
    return compared(rows, paper, order, "; 76.3 to 75.0 % with 4 to 32 nodes (SGP)")


def table_2(rows: list[Row]) -> Beside:
    return compared(rows, TABLE_2, [("SGP", "AR-SGD"), ("SGP", "2P-SGP"), ("2P-SGP", "AR-SGD")], "")


def table_3(rows: list[Row]) -> Beside:
    paper = {name: hours for name, (_, hours) in TABLE_3.items()}
    order = [("1-OSGP", other) for other in paper if other != "1-OSGP"] + [("AD-PSGD", "D-PSGD")]
    return compared(rows, paper, order, "; 75.5 to 76.3 %")


def table_4(rows: list[Row]) -> Beside:
    """Compare the accuracies after as many steps as fit in the time of AR-SGD."""
    score = {row["who"]: 100 * row["accuracy"] for row in rows}
    return Beside(
        ["who", "steps in the same time", "accuracy %", "the paper: %", "hours"],
        [[row["who"], row["steps"], f"{score[row['who']]:.2f}", *TABLE_4[row["who"]]] for row in rows],
        "; ".join(f"{row['who']} {score[row['who']]:.2f} % after {row['steps']} steps" for row in rows),
        "; ".join(f"{who} {percent} % in {hours} h" for who, (percent, hours) in TABLE_4.items()),
        [Goal(f"accuracy of AR-SGD over that of {who}", score["AR-SGD"] / score[who], 1)
         for who in score if who != "AR-SGD"],
    )  # fmt: skip


def figure_4(rows: list[Row]) -> Beside:
    """Compare figure 4: by iterations SGP's loss is like AR-SGD's, and by time SGP is first."""
    loss = {row["who"]: row["losses"][-1] for row in rows}
    seconds = {row["who"]: row["steps"] * row["seconds_a_step"] for row in rows}
    return Beside(
        ["who", "loss at the end", "seconds"],
        [[who, f"{loss[who]:.4f}", f"{seconds[who]:.0f}"] for who in loss],
        "; ".join(f"{who} loss {loss[who]:.3f} after {seconds[who]:.0f} s" for who in loss),
        "alike by iterations; SGP completes the epochs in less time than the others",
        [Goal("loss of SGP less that of AR-SGD", loss["SGP"] - loss["AR-SGD"], 0.1),
         *(Goal(f"seconds of SGP over {who}", seconds["SGP"] / seconds[who], 1)
           for who in ("AR-SGD", "D-PSGD"))],
    )  # fmt: skip


def figure_4_panels(rows: list[Row]) -> list[Panel]:
    by_step = {row["who"]: (xs(row, row["losses"]), row["losses"]) for row in rows}
    by_time = {
        row["who"]: ([t * row["seconds_a_step"] for t in xs(row, row["losses"])], row["losses"])
        for row in rows
    }
    both = {"step": by_step, "seconds": by_time}
    return [Panel("", axis, "training loss", lines, log="y") for axis, lines in both.items()]


def by_nodes(rows: list[Row]) -> dict[str, dict[int, Row]]:
    """Return the rows of paper_scaling.py about this paper, by method and number of nodes."""
    found: dict[str, dict[int, Row]] = {}
    for row in rows:
        if row["figure"].startswith("SGP"):
            found.setdefault(row["method"], {})[row["nodes"]] = row
    return found


def figure_5(rows: list[Row]) -> Beside:
    """Compare how the time of an iteration grows; it is proportional to hours times nodes."""
    of = by_nodes(rows)
    grown = {who: each[32]["hours"] * 8 / each[4]["hours"] for who, each in of.items()}
    paper = {who: hours[32] * 8 / hours[4] for who, hours in TABLE_1.items()}
    names = ("AR-SGD by recursive doubling", "D-PSGD", "SGP")
    sgp, d_psgd = of["SGP"][32], of["D-PSGD"][32]
    return Beside(
        ["time of an iteration, 32 nodes over 4", "by formula", "the paper"],
        [[who, f"{value:.2f}", f"{paper[who]:.2f}" if who in paper else ""] for who, value in grown.items()],
        f"32 nodes over 4, by formula: {told({name: grown[name] for name in names})}",
        f"{told(paper)} over Ethernet; constant for all over InfiniBand",
        [Goal("SGP's growth", grown["SGP"], 1.2), Goal("D-PSGD's growth", grown["D-PSGD"], 1.2),
         Goal("SGP's growth over AR-SGD's", grown["SGP"] / grown["AR-SGD by recursive doubling"], 0.9),
         Goal("hours of SGP over D-PSGD, 32 nodes", sgp["hours"] / d_psgd["hours"], 1 / 1.5)],
    )  # fmt: skip


def figure_5_panels(rows: list[Row]) -> list[Panel]:
    ours = {
        who: (list(each), [row["hours"] for row in each.values()]) for who, each in by_nodes(rows).items()
    }
    papers = {who: (list(hours), list(hours.values())) for who, hours in TABLE_1.items()}
    return [Panel("90 epochs, Ethernet", "nodes", "hours", ours, papers, log="xy")]
