"""EDSR: super-resolution of images by a factor of 2 or 4.

"Enhanced Deep Residual Networks for Single Image Super-Resolution" (Lim et al., 2017),
https://arxiv.org/abs/1707.02921, section 3 and figure 3. The layers are:

- a convolution
- residual blocks without batch norm, whose results are scaled down before they are added, and a convolution;
  their result is added to that of the first convolution
- for each doubling of the size, a convolution that makes four pixels of one
- a last convolution

Hierarchical local SGD trains the model on DIV2K with 32 blocks (section IV-A), which are the defaults here.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from hpcsgd.errors import UserError

MEAN = (0.4488, 0.4371, 0.4040)
"""Mean of each channel of DIV2K's training images, from 0 to 1, which is subtracted from the input."""
DOUBLINGS = {2: 1, 4: 2}
"""Number of doublings of the size, by scale."""


class EDSR(nn.Module):
    """The EDSR model: images [b, 3, H, W] with values from 0 to 1 → [b, 3, scale·H, scale·W]."""

    mean: Tensor

    def __init__(self, scale: int, blocks: int, width: int, residual: float) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(MEAN).view(3, 1, 1), persistent=False)
        self.head = _conv(3, width)
        self.blocks = nn.Sequential(*(Block(width, residual) for _ in range(blocks)))
        self.after = _conv(width, width)
        self.larger = nn.Sequential(*(Doubling(width) for _ in range(DOUBLINGS[scale])))
        self.tail = _conv(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        found = self.head(x - self.mean)
        found = found + self.after(self.blocks(found))
        return self.tail(self.larger(found)) + self.mean


class Block(nn.Module):
    """A residual block x + residual · f(x), where f has two convolutions: [b, width, H, W] → the same."""

    def __init__(self, width: int, residual: float) -> None:
        super().__init__()
        self.conv1, self.conv2 = _conv(width, width), _conv(width, width)
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        return x + self.residual * self.conv2(relu(self.conv1(x)))


class Doubling(nn.Module):
    """A layer that doubles height and width of images: [b, width, H, W] → [b, width, 2·H, 2·W]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = _conv(width, 4 * width)
        self.shuffle = nn.PixelShuffle(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.shuffle(self.conv(x))


def edsr(scale: int = 2, blocks: int = 32, width: int = 256, residual: float = 0.1) -> EDSR:
    """Return an `EDSR`, with 40.7 M parameters at scale 2 and 43.1 M at scale 4.

    Convolutions have torch's initial values. A block's result is multiplied by `residual`. The paper's small
    model, "baseline", is `blocks = 16`, `width = 64`, `residual = 1.0`: 1.4 M and 1.5 M parameters. Raises
    `UserError` for other scales.
    """
    if scale not in DOUBLINGS:
        raise UserError(f"edsr: scale = {scale}: allowed are {' and '.join(map(str, DOUBLINGS))}")
    if min(blocks, width) < 1:
        raise UserError(f"edsr: blocks = {blocks}, width = {width}: must be at least 1")
    return EDSR(scale, blocks, width, residual)


def _conv(inputs: int, outputs: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel_size=3, padding=1)
