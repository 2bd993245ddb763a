"""The residual networks of 50 and 101 layers (He et al., 2015) as they are trained on ImageNet.

https://arxiv.org/abs/1512.03385, table 1 and figure 5. A 7 × 7 convolution and max pooling (the stem) are
followed by four stages of 3, 4, 6 and 3 bottlenecks, or of 3, 4, 23 and 3. Difference from the paper, as in
most code since: if a stage halves height and width, its first 3 × 3 convolution does so, and not the 1 × 1
convolution before it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.functional import relu

from hpcsgd.errors import UserError

WIDTHS = (64, 128, 256, 512)
"""Number of channels of the 3 × 3 convolutions of each stage."""
STEMS = {7: "for ImageNet", 3: "for 32 × 32 pixels"}
"""Allowed sizes of the first convolution. The one for ImageNet has stride 2, and pooling after it."""
EXPANSION = 4
"""How many times as many channels a bottleneck's result has as its 3 × 3 convolution."""


class Bottleneck(nn.Module):
    """A block relu(shortcut(x) + f(x)), where f has 1 × 1, 3 × 3 and 1 × 1 convolutions.

    [b, inputs, H, W] → [b, 4·width, H/stride, W/stride]. The shortcut is x itself, or a 1 × 1 convolution
    with batch norm if f changes the size.
    """

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = EXPANSION * width
        self.conv1, self.norm1 = _conv(inputs, width, 1, 1), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = _conv(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.norm3 = _conv(width, outputs, 1, 1), nn.BatchNorm2d(outputs)
        same = stride == 1 and inputs == outputs
        projection = nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
        self.shortcut = nn.Identity() if same else projection

    def forward(self, x: Tensor) -> Tensor:
        inner = relu(self.norm2(self.conv2(relu(self.norm1(self.conv1(x))))))
        return relu(self.norm3(self.conv3(inner)) + self.shortcut(x))


def resnet50(classes: int = 1000, channels: int = 3, stem: int = 7) -> nn.Sequential:
    """Return the network of 50 layers, 25.6 M parameters: [b, channels, H, W] → [b, classes].

    Convolutions have torch's initial values. `stem = 3` is for images of 32 × 32: a convolution of 3 × 3
    without stride, and no pooling, as in the networks for CIFAR. Raises `UserError` for stems of other
    sizes.
    """
    return _of_blocks((3, 4, 6, 3), classes, channels, stem)


def resnet101(classes: int = 1000, channels: int = 3, stem: int = 7) -> nn.Sequential:
    """Return the network of 101 layers, 44.5 M parameters; otherwise like `resnet50`.

    With `stem = 3` and 10 classes it has 42.5 M. SelSync trains it on CIFAR-10 (section IV-A) and gives no
    further details.
    """
    return _of_blocks((3, 4, 23, 3), classes, channels, stem)


def _of_blocks(blocks: Sequence[int], classes: int, channels: int, stem: int) -> nn.Sequential:
    """Return a network with `blocks[i]` bottlenecks in stage i, and a first convolution of size `stem`."""
    if stem not in STEMS:
        allowed = " and ".join(f"{size} ({which})" for size, which in STEMS.items())
        raise UserError(f"stem = {stem}: allowed are {allowed}", key="stem", value=stem)
    inputs = WIDTHS[0]
    layers: list[nn.Module] = [
        _conv(channels, inputs, stem, 2 if stem == 7 else 1), nn.BatchNorm2d(inputs), nn.ReLU(),
    ]  # fmt: skip
    if stem == 7:
        layers.append(nn.MaxPool2d(3, stride=2, padding=1))
    for stage, (width, count) in enumerate(zip(WIDTHS, blocks, strict=True)):
        for block in range(count):
            layers.append(Bottleneck(inputs, width, stride=2 if stage > 0 and block == 0 else 1))
            inputs = EXPANSION * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def _conv(inputs: int, outputs: int, size: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel_size=size, stride=stride, padding=size // 2, bias=False)
