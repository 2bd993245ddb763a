"""Predicted times and their errors, of the cost model and of the simulation."""

from __future__ import annotations

from website.measured.results import from_to, goal, result, row, rows


def plan() -> str:
    middle, worst = (100 * goal("model_error", name) for name in ("median error", "worst error"))
    assert goal("model_error", "outside the stated interval") == goal("model_error", "ranked wrong") == 0
    found = rows("model_error")
    assert [len({each[key] for each in found}) for key in ("method", "P", "model")] == [8, 4, 2]
    return f"The median error was {middle:.1f} %, the worst {worst:.0f} %, always inside the stated interval."


def goals() -> str:
    found = result("model_error")["goals"]
    assert all(each["met"] for each in found)
    middle, worst, outside, _ = (100 * each["goal"] for each in found)
    return (
        f"Goals, all met: a median error of {middle:.0f} %, a worst one of {worst:.0f} %, {outside:.0f} % "
        "outside the interval."
    )


def largest_simulation() -> str:
    ranks = max(each["N"] for each in rows("simulation_speed"))
    return f"the steps of a job of up to {ranks:,} ranks"


def crossover() -> str:
    errors = from_to(100 * each["value"] for each in result("crossover")["goals"])
    return f"Points are measured on emulated hosts; the model is off by {errors} % there."


def error(late: str) -> float:
    """Return the largest error in percent."""
    return 100 * max(abs(each["error"]) for each in rows("simulation_error", late=late))


def simulation() -> str:
    assert len({each["method"] for each in rows("simulation_error")} - {"ensemble"}) == 6
    lasting, wandering = error("rank 2, twice as long"), error("one in five, thrice as long")
    return (
        f"speeds are within {lasting:.1f} % if one rank is twice as slow, and within {wandering:.1f} % if in "
        "each step one in five ranks is three times as slow."
    )


def simulated_failures() -> str:
    each = row("simulation_error", method="ensemble")
    return f"{each['simulated']:.2f} steps per second were simulated and {each['measured']:.2f} measured."
