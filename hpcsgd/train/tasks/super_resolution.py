"""What did it look like before it was reduced? The mean absolute difference, and the PSNR.

"Enhanced Deep Residual Networks for Single Image Super-Resolution" (https://arxiv.org/abs/1707.02921, section
4.2): trained by L1. The PSNR is that of most papers: of the luminance Y of BT.601 from 16 to 235, of values
rounded to 8 bits, without as many pixels at each border as the scale; 10 · log10(255² / mean square) of each
image, and the mean of these. Difference from that paper's figures on DIV2K, which are of RGB and lower;
hierarchical local SGD (Table II) does not say of what its figures are.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import l1_loss

from hpcsgd.data import Pairs
from hpcsgd.train.tasks.task import Result, tally_of, unfit

LUMINANCE = (65.481, 128.553, 24.966)
"""Of red, green and blue from 0 to 1; black is 16."""
BLACK = 16.0
PEAK = 255.0
HIGHEST = 100.0
"""Decibels of images that are the same."""


class SuperResolution:
    """Images [b, 3, s·h, s·w], from 0 to 1, and y of the same shape."""

    at_once = 1  # images to test on are of unlike sizes
    tokens = None
    tallied = 3

    def __init__(self, data: Pairs) -> None:
        self._data = data

    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        return l1_loss(scores, y)

    def tally(self, scores: Tensor, y: Tensor) -> Tensor:
        """Loss (the mean of each image), decibels, images."""
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
    """Of each of `images` [b, 3, H, W], from 0 to 1, against `y`, without the `border`: float64 [b]."""
    difference = luminance(images) - luminance(y)
    inside = difference[:, border : difference.shape[1] - border, border : difference.shape[2] - border]
    squares = inside.square().flatten(1).mean(1)
    return (10 * torch.log10(PEAK**2 / squares)).clamp(max=HIGHEST)


def luminance(images: Tensor) -> Tensor:
    """Y of what is left of `images` [b, 3, H, W] in 8 bits: float64 [b, H, W]."""
    rounded = images.double().clamp(0, 1).mul(PEAK).round() / PEAK
    weights = rounded.new_tensor(LUMINANCE).view(3, 1, 1)
    return BLACK + (rounded * weights).sum(1)
