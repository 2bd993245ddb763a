"""A small convolutional network for small images."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from hpcsgd.errors import UserError


def cnn(shape: Sequence[int], classes: int = 10, widths: Sequence[int] = (32, 64)) -> nn.Sequential:
    """Return 3 x 3 convolutions, each followed by ReLU and 2 x 2 pooling, and a linear layer.

    [b, C, H, W] → [b, classes]. `shape` is (C, H, W), and `widths` has the numbers of output channels of the
    convolutions. Raises `UserError` if the pooling leaves no pixel.
    """
    if len(shape) != 3:
        raise UserError(f"shape {list(shape)}: three numbers are needed, channels, height, width")
    channels, height, width = shape
    shrink = 2 ** len(widths)
    if min(height, width) < shrink:
        raise UserError(
            f"shape {list(shape)}: {len(widths)} poolings need at least {shrink} x {shrink} pixels"
        )
    layers: list[nn.Module] = []
    for outputs in widths:
        layers += [nn.Conv2d(channels, outputs, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        channels = outputs
    features = channels * (height // shrink) * (width // shrink)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, classes))
