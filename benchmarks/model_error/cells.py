"""The cells that are predicted and measured: models × methods × shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from hpcsgd.methods import (
    Method,
    ad_psgd,
    allreduce_local_sgd,
    bsp,
    d_psgd,
    hierarchical,
    osgp,
    selsync,
    sgp,
)  # fmt: skip

INPUTS, CLASSES = 256, 10
WIDTHS = {"0.6 M": 490, "1.2 M": 700}
B = 64
"""Number of samples per group and step."""
EVERY = 4
RANKS_PER_HOST = 2
SHAPES = [(1, 8), (2, 4), (4, 2), (8, 1)]
"""Pairs of P and K."""
METHODS: dict[str, Callable[[], Method]] = {
    "bsp": bsp,
    "hierarchical": lambda: hierarchical(EVERY),
    "allreduce_local_sgd": lambda: allreduce_local_sgd(EVERY),
    "selsync": lambda: selsync(0.0),
    "sgp": sgp,
    "d_psgd": d_psgd,
    "osgp": lambda: osgp(1),
    "ad_psgd": ad_psgd,
}
"""The methods that plan offers, and one that synchronizes in every step because its gradients say so."""
STEPS: Mapping[str, int] = dict.fromkeys(METHODS, EVERY) | {"ad_psgd": 16, "osgp": 16}
"""Number of steps of a block.

For most methods it is the number from one synchronization to the next. For the others it is so large that
every group has had several of its random partners, and that the pending message at the end of a block matters
little.
"""


@dataclass(frozen=True)
class Cell:
    model: str
    method: str
    P: int
    K: int


def cells(models: list[str], shapes: list[tuple[int, int]]) -> Iterator[Cell]:
    """Yield the cells. With one group all methods are bsp, except the one that reduces whole vectors."""
    for model in models:
        for P, K in shapes:
            for method in METHODS if P > 1 else ("bsp", "allreduce_local_sgd"):
                yield Cell(model, method, P, K)


def network(model: str) -> nn.Module:
    torch.manual_seed(1)
    h = WIDTHS[model]
    layers = [nn.Linear(INPUTS, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(h, CLASSES))
