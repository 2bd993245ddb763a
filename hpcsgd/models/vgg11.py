"""VGG-A, with 11 layers, of "Very Deep Convolutional Networks for Large-Scale Image Recognition".

Simonyan and Zisserman, 2014, https://arxiv.org/abs/1409.1556, table 1: eight convolutions of 3 × 3, 2 × 2
max pooling after five of them, and three linear layers. Difference from the paper: the result of the last
pooling is averaged to a square of fixed size, so that images may have any size from 32 × 32. SelSync trains
the model on CIFAR-100 (section IV-A). The 507 MB that the SelSync paper names (section II-A) are the size of
all weights with 1000 classes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from hpcsgd.errors import UserError

STAGES = ((64,), (128,), (256, 256), (512, 512), (512, 512))
"""For each stage, which ends with a pooling, the numbers of channels of its convolutions."""


def vgg11(
    classes: int = 1000,
    channels: int = 3,
    hidden: Sequence[int] = (4096, 4096),
    pooled: int = 7,
    dropout: float = 0.5,
) -> nn.Sequential:
    """Return VGG-11, 132.9 M parameters: [b, channels, H, W] → [b, classes], for H, W ≥ 32.

    `hidden` are the widths of the linear layers before the last one. Each is followed by dropout, where
    `dropout` is the fraction of dropped values. Before the linear layers the result of the convolutions is
    averaged to `pooled` × `pooled` pixels. The defaults are for images of 224 × 224. For 32 × 32, where the
    last pooling leaves a single pixel, `hidden = []` and `pooled = 1` are usual: 9.2 M parameters for 10
    classes. Raises `UserError` for impossible sizes.
    """
    if min([pooled, classes, channels, *hidden]) < 1:
        given = f"hidden = {list(hidden)}, pooled = {pooled}, classes = {classes}, channels = {channels}"
        raise UserError(f"vgg11: {given}: must be at least 1")
    if not 0 <= dropout < 1:
        raise UserError(f"vgg11: dropout = {dropout}: must be at least 0 and less than 1")
    layers: list[nn.Module] = []
    for stage in STAGES:
        for width in stage:
            layers += [nn.Conv2d(channels, width, kernel_size=3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.AdaptiveAvgPool2d(pooled), nn.Flatten()]
    features = channels * pooled**2
    for width in hidden:
        layers += [nn.Linear(features, width), nn.ReLU(), nn.Dropout(dropout)]
        features = width
    network = nn.Sequential(*layers, nn.Linear(features, classes))
    network.apply(_initialize)
    return network


def _initialize(module: nn.Module) -> None:
    """Initialize a layer such that signals neither vanish nor explode over eight convolutions.

    This is needed because the network has no batch norm. The paper trained a smaller network first instead.
    """
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(module.bias)  # pyright: ignore[reportArgumentType] - there is one
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.01)
        nn.init.zeros_(module.bias)
