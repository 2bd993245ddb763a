"""A multi-layer perceptron."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn


def mlp(inputs: int, hidden: Sequence[int] = (128,), classes: int = 10) -> nn.Sequential:
    """Return linear layers with `hidden` units and ReLU, and a last layer: [b, ...] → [b, classes].

    `inputs` is the number of values of a sample.
    """
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise([inputs, *hidden]):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear([inputs, *hidden][-1], classes))
