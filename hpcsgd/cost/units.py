"""Check that α and β in a machine file are in seconds, and not in units such as microseconds or GB/s."""

from __future__ import annotations

from collections.abc import Mapping

from hpcsgd.cost.links import Link
from hpcsgd.errors import UserError

ALPHA_SECONDS = (50e-9, 1e-3)
"""The bounds of a plausible α."""
BETA_SECONDS_PER_BYTE = (1e-13, 1e-6)
"""The bounds of a plausible β: from 10 TB/s to 1 MB/s."""


def require_plausible(link: Link) -> None:
    """Raise `UserError` if no network and no memory has the α or β of `link`; it suggests the unit meant."""
    for alpha in link.alpha_seconds:
        if not _within(alpha, ALPHA_SECONDS):
            raise UserError(f"alpha_seconds = {alpha:g}: {_doubt_alpha(alpha)}")
    for beta in link.beta_seconds_per_byte:
        if not _within(beta, BETA_SECONDS_PER_BYTE):
            raise UserError(f"beta_seconds_per_byte = {beta:g}: {_doubt_beta(beta)}")


def _within(value: float, bounds: tuple[float, float]) -> bool:
    return bounds[0] <= value < bounds[1]


def _doubt_alpha(alpha: float) -> str:
    if alpha < ALPHA_SECONDS[0]:
        return f"{1e9 * alpha:g} ns for a message; 50 ns to 1 ms are allowed, 2 µs is written 2e-6"
    units = {"microseconds": 1e-6 * alpha, "nanoseconds": 1e-9 * alpha, "milliseconds": 1e-3 * alpha}
    return f"{alpha:g} s for a message; {_guess(units, ALPHA_SECONDS)}"


def _doubt_beta(beta: float) -> str:
    if beta < BETA_SECONDS_PER_BYTE[0]:
        rate = f"{1e-12 / beta:g} TB/s" if beta else "no time for a byte"
        return f"{rate}; 1 MB/s to 10 TB/s are allowed, 12.5 GB/s is written 8e-11"
    rates = {"GB/s": 1e-9 / beta, "bytes a second": 1 / beta}
    times = {"nanoseconds a byte": 1e-9 * beta, "microseconds a byte": 1e-6 * beta}
    guesses = rates | times if beta >= 1 else times | rates
    return f"{beta:g} s for a byte; {_guess(guesses, BETA_SECONDS_PER_BYTE)}"


def _guess(meant: Mapping[str, float], bounds: tuple[float, float]) -> str:
    """Return a hint for a number that is out of `bounds`: the first unit in which it would be plausible.

    `meant` has the number in seconds, by the unit that the user may have meant.
    """
    low, high = bounds
    fitting = [(unit, seconds) for unit, seconds in meant.items() if _within(seconds, bounds)]
    if not fitting:
        return f"at least {low:g} and below {high:g} are allowed"
    unit, seconds = fitting[0]
    return f"in {unit}? write {seconds:.3g}"
