"""Predicted times and their errors in docs/plan.md, docs/simulate.md and docs/choosing.md."""

from __future__ import annotations

from website.measured.results import from_to, goal, result, row, rows


def plan() -> str:
    middle, worst = (100 * goal("model_error", name) for name in ("median error", "worst error"))
    assert goal("model_error", "outside the stated interval") == goal("model_error", "ranked wrong") == 0
    return f"The median error was {middle:.1f} %, the worst {worst:.0f} %, always inside the stated interval."


def crossover() -> str:
    errors = from_to(100 * each["value"] for each in result("crossover")["goals"])
    return f"Points are measured on emulated hosts; the model is off by {errors} % there."


def error(late: str) -> float:
    """Return the largest error in percent."""
    return 100 * max(abs(each["error"]) for each in rows("simulation_error", late=late))


def simulation() -> str:
    lasting, wandering = error("rank 2, twice as long"), error("one in five, thrice as long")
    return (
        f"speeds are within {lasting:.1f} % if one rank is twice as slow, and within {wandering:.1f} % if in "
        "each step one in five ranks is three times as slow."
    )


def simulated_failures() -> str:
    each = row("simulation_error", method="ensemble")
    return f"{each['simulated']:.2f} steps per second were simulated and {each['measured']:.2f} measured."
