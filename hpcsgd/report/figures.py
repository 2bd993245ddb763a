"""What says how good a model is, the figures of merit that tasks have, and how fast it trains; how to read
them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Figure:
    """`best` chooses among values; `form` is how one is written."""

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
"""By the key that they have in records."""


def found_in(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """The keys of those that all these records have, of which the first is what counts."""
    rows = list(records)
    return [key for key in FIGURES if rows and all(key in row for row in rows)]


def written(values: Mapping[str, float]) -> str:
    """As ``accuracy 0.9000``, those of `FIGURES` alone."""
    return "  ".join(f"{FIGURES[key].name} {FIGURES[key].text(values[key])}" for key in found_in([values]))


def speed_text(numbers: Mapping[str, Any]) -> str:
    """As ``1,234 samples/s``, or in tokens where samples are made of them, and the part of the peak."""
    quantity = "samples" if numbers.get("tokens_per_s") is None else "tokens"
    speed = f"{numbers[f'{quantity}_per_s']:,.0f} {quantity}/s"
    part = numbers.get("utilization")
    return speed if part is None else f"{speed}, {part:.1%} of the peak"
