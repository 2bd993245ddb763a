"""The residual networks of 10 and 18 layers (He et al., 2015) as they are trained on CIFAR.

https://arxiv.org/abs/1512.03385, table 1. The network of 18 layers has four stages of two blocks, with 64,
128, 256 and 512 channels. Each stage except the first halves height and width. With one block per stage, it
is the network of 10 layers that EnsembleSync trains (its section 4.1), which is not in the paper of He et al.
Shortcuts are the paper's option B: if the size changes, a 1 x 1 convolution with batch norm. Difference from
the paper's networks, which are for ImageNet: the first convolution is 3 x 3 without stride, and there is no
max pooling, so that images of 32 x 32 pixels are still 4 x 4 in the last stage.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import relu

WIDTHS = (64, 128, 256, 512)
"""Number of channels of each stage."""


class ProjectionBlock(nn.Module):
    """A block relu(shortcut(x) + f(x)), where f has two convolutions with batch norm.

    [b, inputs, H, W] → [b, outputs, H/stride, W/stride]. The shortcut is x itself, or a 1 x 1 convolution
    with batch norm if f changes the size.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = _conv(inputs, outputs, stride), nn.BatchNorm2d(outputs)
        self.conv2, self.norm2 = _conv(outputs, outputs, 1), nn.BatchNorm2d(outputs)
        projection = nn.Conv2d(inputs, outputs, kernel_size=1, stride=stride, bias=False)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Sequential(projection, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        residual = self.norm2(self.conv2(relu(self.norm1(self.conv1(x)))))
        return relu(residual + self.shortcut(x))


def resnet10(classes: int = 10, channels: int = 3) -> nn.Sequential:
    """Return the network of 10 layers, 4.9 M parameters: [b, channels, H, W] → [b, classes].

    Convolutions have torch's initial values. With the stem of ImageNet, for 1000 classes, it would have 5.4
    M.
    """
    return _of_blocks(1, classes, channels)


def resnet18(classes: int = 10, channels: int = 3) -> nn.Sequential:
    """Return the network of 18 layers, 11.2 M parameters: [b, channels, H, W] → [b, classes].

    Convolutions have torch's initial values.
    """
    return _of_blocks(2, classes, channels)


def _of_blocks(blocks: int, classes: int, channels: int) -> nn.Sequential:
    """Return a network with `blocks` blocks in each stage."""
    layers: list[nn.Module] = [_conv(channels, WIDTHS[0], 1), nn.BatchNorm2d(WIDTHS[0]), nn.ReLU()]
    inputs = WIDTHS[0]
    for width in WIDTHS:
        for block in range(blocks):
            layers.append(ProjectionBlock(inputs, width, stride=2 if width > inputs and block == 0 else 1))
            inputs = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def _conv(inputs: int, outputs: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=False)
