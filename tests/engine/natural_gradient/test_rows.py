"""If all rows are taken, Yᵀ X is the gradient of the weight. This defines X and Y."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpcsgd.engine.natural_gradient.rows import input_rows, output_rows, weight_of

ALL = 10**6


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(5, 3), (4, 5)),
    "linear over positions": (nn.Linear(5, 3), (4, 2, 6, 5)),
    "linear, one sample": (nn.Linear(5, 3), (5,)),
    "conv 1d": (nn.Conv1d(2, 3, 4, stride=2, padding=1), (4, 2, 11)),
    "conv 2d": (nn.Conv2d(2, 3, 3, padding=1), (4, 2, 6, 5)),
    "strides": (nn.Conv2d(2, 3, (3, 2), stride=(2, 3)), (4, 2, 8, 9)),
    "dilations": (nn.Conv2d(2, 3, 3, dilation=(2, 1), padding=(2, 0)), (4, 2, 8, 9)),
    "same padding": (nn.Conv2d(2, 3, (2, 3), padding="same"), (4, 2, 5, 6)),
    "valid padding": (nn.Conv2d(2, 3, 2, padding="valid"), (4, 2, 5, 6)),
    "circular padding": (nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (4, 2, 5, 6)),
    "no batch": (nn.Conv2d(2, 3, 3), (2, 5, 6)),
    "conv 3d": (nn.Conv3d(2, 3, 2, stride=(1, 2, 1)), (2, 2, 4, 5, 3)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_they_are_the_factors_of_the_gradient(name: str, channels_last: bool) -> None:
    made, shape = LAYERS[name]
    layer: Any = made.double()
    layer.zero_grad()
    x = randn(*shape)
    if channels_last and x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    y = layer(x)
    g = randn(*y.shape)
    y.backward(g)
    X, Y = input_rows(layer, x, ALL, 0.0), output_rows(layer, g, ALL, 0.0)
    assert X is not None
    torch.testing.assert_close((Y.T @ X).view_as(layer.weight), layer.weight.grad)


def test_some_rows_come_from_everywhere() -> None:
    conv = nn.Conv2d(1, 1, 1)
    x = torch.arange(8 * 16 * 16.0).view(8, 1, 16, 16)
    for shift in (0.0, 0.3):
        found = input_rows(conv, x, 64, shift)
        assert found is not None
        assert found.shape == (64, 1)
        places = found.long().flatten()
        assert len(set((places // 256).tolist())) == 8
        assert len(set((places % 16).tolist())) == 16
        assert len(set(places.tolist())) == 64
    assert not torch.equal(*(torch.as_tensor(input_rows(conv, x, 64, s)) for s in (0.0, 0.3)))


def test_rows_are_copies_of_at_least_single_precision() -> None:
    x = torch.ones(3, 5, dtype=torch.bfloat16)
    found = input_rows(nn.Linear(5, 2), x, ALL, 0.0)
    assert found is not None
    assert found.dtype == torch.float32
    x64 = torch.ones(3, 5, dtype=torch.float64)
    kept = input_rows(nn.Linear(5, 2), x64, ALL, 0.0)
    x64.zero_()
    assert kept is not None
    assert kept.sum() == 15


def test_inputs_of_another_shape_have_no_rows() -> None:
    assert input_rows(nn.Linear(5, 2), torch.ones(3, 4), ALL, 0.0) is None
    assert input_rows(nn.Conv2d(2, 3, 3), torch.ones(4, 3, 5, 5), ALL, 0.0) is None


def test_layers_that_are_not_ours() -> None:
    parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    others = [nn.Conv2d(4, 4, 3, groups=2), nn.ConvTranspose2d(2, 2, 3), nn.BatchNorm1d(3), parametrized]
    assert [weight_of(layer) for layer in others] == [None] * 4
