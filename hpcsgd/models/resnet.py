"""The residual networks for CIFAR of "Deep Residual Learning for Image Recognition" (He et al., 2015).

https://arxiv.org/abs/1512.03385, section 4.2. The networks have a first 3 x 3 convolution, three stages of n
blocks with 16, 32 and 64 channels, global average pooling and one linear layer: 6n + 2 layers. Shortcuts are
the paper's option A: if the size changes, they use every second pixel and fill new channels with zeros, so
that they have no parameters. The networks of that paper for ImageNet (torchvision's resnet18 and so on) are
different, and wider.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import pad, relu

from hpcsgd.errors import UserError

WIDTHS = (16, 32, 64)
"""Number of channels of each stage."""


class Block(nn.Module):
    """A block relu(x + f(x)), where f has two convolutions with batch norm.

    [b, inputs, H, W] → [b, outputs, H/stride, W/stride].
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = _conv(inputs, outputs, stride), nn.BatchNorm2d(outputs)
        self.conv2, self.norm2 = _conv(outputs, outputs, 1), nn.BatchNorm2d(outputs)
        self.stride, self.new_channels = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        residual = self.norm2(self.conv2(relu(self.norm1(self.conv1(x)))))
        return relu(residual + self._shortcut(x))

    def _shortcut(self, x: Tensor) -> Tensor:
        if self.stride == 1 and self.new_channels == 0:
            return x
        before = self.new_channels // 2
        after = self.new_channels - before
        return pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, before, after))


def cifar_resnet(depth: int, classes: int = 10, channels: int = 3) -> nn.Sequential:
    """Return the network of `depth` = 6n + 2 layers: [b, channels, H, W] → [b, classes].

    Raises `UserError` for another depth.
    """
    blocks, rest = divmod(depth - 2, 6)
    if rest or blocks < 1:
        raise UserError(f"depth {depth}: must be 6n + 2 with n of 1 or more, such as 20, 32, 44, 56, 110")
    layers: list[nn.Module] = [_conv(channels, WIDTHS[0], 1), nn.BatchNorm2d(WIDTHS[0]), nn.ReLU()]
    inputs = WIDTHS[0]
    for width in WIDTHS:
        for _ in range(blocks):
            layers.append(Block(inputs, width, stride=1 if inputs == width else 2))
            inputs = width
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))
    network.apply(_initialize)
    return network


def resnet20(classes: int = 10, channels: int = 3) -> nn.Sequential:
    """Return the `cifar_resnet` of 20 layers, 0.27 M parameters."""
    return cifar_resnet(20, classes, channels)


def resnet32(classes: int = 10, channels: int = 3) -> nn.Sequential:
    """Return the `cifar_resnet` of 32 layers, 0.46 M parameters."""
    return cifar_resnet(32, classes, channels)


def resnet44(classes: int = 10, channels: int = 3) -> nn.Sequential:
    """Return the `cifar_resnet` of 44 layers, 0.66 M parameters."""
    return cifar_resnet(44, classes, channels)


def resnet56(classes: int = 10, channels: int = 3) -> nn.Sequential:
    """Return the `cifar_resnet` of 56 layers, 0.85 M parameters."""
    return cifar_resnet(56, classes, channels)


def resnet110(classes: int = 10, channels: int = 3) -> nn.Sequential:
    """Return the `cifar_resnet` of 110 layers, 1.7 M parameters."""
    return cifar_resnet(110, classes, channels)


def _conv(inputs: int, outputs: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=False)


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
