"""Random variations of training images, one batch at a time."""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn.functional import pad

from hpcsgd.errors import UserError

PADDING = 4
"""Number of zeros added on each side of an image."""


def crop_and_flip(x: Tensor, generator: Generator) -> Tensor:
    """Pad images of x [b, C, H, W] by 4 zeros on all sides, take random crops, and mirror half of them.

    A crop has H x W pixels. This is the usual augmentation of CIFAR (https://arxiv.org/abs/1512.03385,
    section 4.2). All random numbers come from `generator`. The result is a new tensor like x.

    Raises `UserError` for samples that are no images.
    """
    if x.dim() != 4:
        raise UserError(f"crop_and_flip: samples of shape {list(x.shape[1:])} are no images [C, H, W]")
    b, _, height, width = x.shape
    padded = pad(x, (PADDING,) * 4)
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # [b, C, 9, 9, H, W], a view
    top, left = _random(2 * PADDING + 1, (2, b), generator).to(x.device)
    cropped = windows[torch.arange(b, device=x.device), :, top, left]
    flip = _random(2, (b, 1, 1, 1), generator).to(x.device, torch.bool)
    return torch.where(flip, cropped.flip(3), cropped)


def _random(below: int, shape: tuple[int, ...], generator: Generator) -> Tensor:
    return torch.randint(below, shape, generator=generator, device=generator.device)
