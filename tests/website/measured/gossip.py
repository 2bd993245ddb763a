"""Figures in docs/gossip.md about speed and accuracy."""

from __future__ import annotations

from statistics import mean

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
    return f"`sgp` gains at most a factor of {gained:.1f} here"
