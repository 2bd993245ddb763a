"""AlexNet, in the form of "One weird trick for parallelizing convolutional neural networks".

Krizhevsky, 2014, https://arxiv.org/abs/1404.5997: five convolutions, three of them with 3 × 3 max pooling,
and three linear layers, on one device and without normalization of responses. Difference from the paper: the
result of the last pooling is averaged to 6 × 6, so that images may have any size from 63 × 63. SelSync trains
the model on ImageNet (section IV-A).
"""

from __future__ import annotations

from torch import nn

from hpcsgd.errors import UserError

POOLED = 6
"""Side of the averaged result of the convolutions, in pixels."""
HIDDEN = 4096
"""Number of units of a hidden linear layer."""


def alexnet(classes: int = 1000, channels: int = 3, dropout: float = 0.5) -> nn.Sequential:
    """Return AlexNet, 61.1 M parameters: [b, channels, H, W] → [b, classes], for H, W ≥ 63, made for 224.

    `dropout` is the fraction of values dropped before the first two linear layers in training. Raises
    `UserError` if it is not in [0, 1).
    """
    if not 0 <= dropout < 1:
        raise UserError(f"alexnet: dropout = {dropout}: must be at least 0 and less than 1")
    return nn.Sequential(
        *_layer(channels, 64, 11, stride=4, padding=2),
        nn.MaxPool2d(3, stride=2),
        *_layer(64, 192, 5),
        nn.MaxPool2d(3, stride=2),
        *_layer(192, 384, 3),
        *_layer(384, 256, 3),
        *_layer(256, 256, 3),
        nn.MaxPool2d(3, stride=2),
        nn.AdaptiveAvgPool2d(POOLED),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(256 * POOLED**2, HIDDEN),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(HIDDEN, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, classes),
    )


def _layer(
    inputs: int, outputs: int, size: int, *, stride: int = 1, padding: int | None = None
) -> list[nn.Module]:
    around = size // 2 if padding is None else padding
    return [nn.Conv2d(inputs, outputs, size, stride, around), nn.ReLU()]
