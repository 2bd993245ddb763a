"""Figures in docs/gossip.md and benchmarks/README.md about gossip."""

from __future__ import annotations

from functools import cache
from statistics import mean

import torch

from hpcsgd.core.graphs import Exponential, Graph, PowersOfTwo
from hpcsgd.core.mixing import push_matrix
from website.measured.results import result, row, rows, table

LINES = {
    "DDP (gloo)": "DDP (gloo)",
    "`bsp`": "AR-SGD",
    "`d_psgd`": "D-PSGD",
    "`sgp`": "SGP",
    "`sgp(2)`": "2P-SGP",
    "`osgp(1)`": "1-OSGP",
    "`ad_psgd`": "AD-PSGD",
    "`async_sgd`": "async SGD",
}
HOURS = {"AR-SGD": 8.5, "D-PSGD": 4.9, "SGP": 3.2, "1-OSGP": 1.8, "AD-PSGD": 2.9}
"""The paper's times on 16 hosts."""


def straggling() -> float:
    """Return the seconds that the straggler sleeps per step."""
    return max(each["delay"] for each in rows("gossip") if "delay" in each)


def cells(who: str) -> list[str]:
    quiet, late = (row("gossip", who=who, delay=delay) for delay in (0.0, straggling()))
    trained = [each["accuracy"] for each in rows("gossip", who=who) if "accuracy" in each]
    return [
        f"{quiet['seconds_a_step']['median']:.2f}",
        *(f"{each['rate_over_AR']['median']:.2f}" for each in (quiet, late)),
        f"{HOURS['AR-SGD'] / HOURS[who]:.2f}" if who in HOURS else "",
        f"{100 * mean(trained):.2f} %" if trained else "",
    ]


def speed() -> str:
    return table([name, *cells(who)] for name, who in LINES.items())


def communicating() -> str:
    times = result("gossip")["machine"]["communication_over_computing"]
    return f"`bsp` communicates {times:.1f} times as long as it computes."


def straggler() -> str:
    return f"The straggler is one rank that sleeps {straggling():.2f} s in every step."


def gain() -> str:
    gained = row("gossip", who="SGP", delay=0.0)["rate_over_AR"]["median"]
    (hosts,) = {each["ranks"] for each in rows("gossip") if "ranks" in each}
    assert f"{gained:.1f}" == f"{least_of_an_average(hosts):.1f}"
    return (
        f"`sgp` gains at most a factor of {gained:.1f} here, and {least_of_an_average(10**9):.0f} with many "
        "groups."
    )


def least_of_an_average(hosts: int) -> float:
    """Return what an average over the groups sends at least, in sizes of the model."""
    return 2 * (hosts - 1) / hosts


def hidden() -> str:
    """Return the most that `osgp(1)` can gain, with the times of computing and of the link in the result."""
    c = row("gossip", who="compute only", delay=0.0)["seconds_a_step"]["median"]
    m = row("gossip", who="1-OSGP", delay=0.0)["link_seconds_a_step"]
    average = least_of_an_average(4)
    here, alike = ((c + average * m) / max(c, m) for c, m in ((c, m), (1.0, 1.0)))
    return f"(c + {average:.1f}·m)/max(c, m) times as fast as `bsp`: {here:.1f} here, {alike:.1f} for c = m."


@cache
def steps_to_the_mean(graph: Graph, groups: int) -> int:
    """Return after how many steps the share of each group in each model is 1/`groups`, to within 1e-12."""
    mixed, t = torch.eye(groups, dtype=torch.float64), 0
    while (mixed - 1 / groups).abs().max() >= 1e-12:
        mixed, t = push_matrix(graph, t, groups) @ mixed, t + 1
    return t


def two_peers() -> str:
    steps = {n: steps_to_the_mean(Exponential(2), n) for n in range(5, 33)}
    few = {n: each for n, each in steps.items() if each <= 3}
    *most, last = few
    return (
        f"of it in {min(few.values())} or {max(few.values())} steps with {', '.join(map(str, most))} and "
        f"{last}."
    )


def base_three() -> str:
    both = {n: [steps_to_the_mean(graph(2), n) for graph in (Exponential, PowersOfTwo)] for n in range(2, 33)}
    *most, last = (n for n, (three, two) in both.items() if three == two)
    *more, worst = (f"{n} ({three} and {two})" for n, (three, two) in both.items() if three > two)
    return (
        f"Of 2 to 32 groups base 3 needs fewer steps for {sum(three < two for three, two in both.values())} "
        f"numbers, as many for {', '.join(map(str, most))} and {last}, and more for {', '.join(more)} and "
        f"{worst}."
    )
