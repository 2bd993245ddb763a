"""Figures in docs/natural_gradient.md."""

from __future__ import annotations

from website.measured.results import row


def natural_gradient() -> str:
    resnet, mlp = (ratio(model) for model in ("ResNet-20", "MLP 25M"))
    return (
        f"With rank 20 a step took {resnet:.2f} times as long for ResNet-20, and {mlp:.2f} times for an MLP "
        "of 25 million parameters"
    )


def ratio(model: str) -> float:
    return row("natural_gradient", model=model, who="natural gradient, rank 20")["ratio"]["median"]
