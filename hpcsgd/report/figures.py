"""Figures of merit of tasks, and the text forms of these figures and of the training speed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Figure:
    """A figure of merit, such as accuracy. `best` (`min` or `max`) selects the best value.

    `form` is the format specification with which a value is printed.
    """

    name: str
    best: Callable[..., Any]
    form: str = ".4f"

    def text(self, value: float) -> str:
        return format(value, self.form)


FIGURES: Mapping[str, Figure] = {
    "accuracy": Figure("accuracy", max),
    "perplexity": Figure("perplexity", min, ".2f"),
    "bits_per_byte": Figure("bits/byte", min),
    "hr10": Figure("HR@10", max),
    "ndcg10": Figure("NDCG@10", max),
    "psnr": Figure("PSNR", max, ".2f"),
}
"""The figures of merit by their keys in records."""


def found_in(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the keys of the figures of merit that all `records` have, the most important first."""
    rows = list(records)
    return [key for key in FIGURES if rows and all(key in row for row in rows)]


def written(values: Mapping[str, float]) -> str:
    """Return the figures of merit among `values` as text, such as ``accuracy 0.9000``."""
    return "  ".join(f"{FIGURES[key].name} {FIGURES[key].text(values[key])}" for key in found_in([values]))


def speed_text(numbers: Mapping[str, Any]) -> str:
    """Return the speed as text, such as ``1,234 samples/s``, or tokens/s if samples have tokens.

    If the utilization is known, it is added as a fraction of the peak.
    """
    quantity = "samples" if numbers.get("tokens_per_s") is None else "tokens"
    speed = f"{numbers[f'{quantity}_per_s']:,.0f} {quantity}/s"
    part = numbers.get("utilization")
    return speed if part is None else f"{speed}, {part:.1%} of the peak"
