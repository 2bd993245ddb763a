"""Super-resolution: the mean absolute difference to the original image, and the PSNR.

"Enhanced Deep Residual Networks for Single Image Super-Resolution" (https://arxiv.org/abs/1707.02921,
section 4.2) trains by L1. The PSNR is computed as in most papers: from the luminance Y of BT.601 (16 to 235),
with values rounded to 8 bits, without a border as wide as the scale. It is 10 · log10(255² / mean square
difference) per image, averaged over images. That paper's figures on DIV2K are computed from RGB, and lower.
The paper on hierarchical local SGD (Table II) does not say what its figures are computed from.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import l1_loss

from hpcsgd.data import Pairs
from hpcsgd.train.tasks.task import Result, tally_of, unfit

LUMINANCE = (65.481, 128.553, 24.966)
"""Weights of red, green and blue (0 to 1) in the luminance, to which `BLACK` is added."""
BLACK = 16.0
PEAK = 255.0
HIGHEST = 100.0
"""Decibels that identical images get, and the maximum for others."""


class SuperResolution:
    """The task for images [b, 3, s·h, s·w], from 0 to 1, and y of the same shape; s is the scale."""

    at_once = 1  # test images have different sizes
    tokens = None
    tallied = 3

    def __init__(self, data: Pairs) -> None:
        self._data = data

    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        return l1_loss(scores, y)

    def tally(self, scores: Tensor, y: Tensor) -> Tensor:
        """Return the sums of loss (the mean of each image), decibels and images."""
        loss = (scores - y).abs().flatten(1).mean(1).sum()
        return tally_of(loss, psnr(scores, y, self._data.scale).sum(), len(y))

    def result(self, tally: Tensor) -> Result:
        loss, decibels, count = tally.tolist()
        return Result(loss / count, {"psnr": decibels / count})

    def require(self, scores: Tensor, x: Tensor, model: str) -> None:
        b, channels, h, w = x.shape
        s = self._data.scale
        expected = [b, channels, s * h, s * w]
        if list(scores.shape) != expected:
            raise unfit(model, scores, x, f"{self._data.path} is reduced {s} times", expected)


def psnr(images: Tensor, y: Tensor, border: int) -> Tensor:
    """Return the PSNR of `images` [b, 3, H, W], from 0 to 1, to `y`, without the `border`: float64 [b]."""
    difference = luminance(images) - luminance(y)
    inside = difference[:, border : difference.shape[1] - border, border : difference.shape[2] - border]
    squares = inside.square().flatten(1).mean(1)
    return (10 * torch.log10(PEAK**2 / squares)).clamp(max=HIGHEST)


def luminance(images: Tensor) -> Tensor:
    """Return the luminance Y of `images` [b, 3, H, W] after rounding to 8 bits: float64 [b, H, W]."""
    rounded = images.double().clamp(0, 1).mul(PEAK).round() / PEAK
    weights = rounded.new_tensor(LUMINANCE).view(3, 1, 1)
    return BLACK + (rounded * weights).sum(1)
