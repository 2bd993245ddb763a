"""Tests of the predicted sizes of what torch gathers as one unit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hpcsgd.core.rows import Unit


@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 2), (torch.float32, 4)])
def test_gradients_of_16_bits_are_added_up_in_32(dtype: torch.dtype, width: int) -> None:
    """5 rows for 2 ranks are 6 with padding."""
    trained, frozen = nn.Parameter(torch.zeros(5, 3, dtype=dtype)), nn.Parameter(torch.zeros(2, dtype=dtype))
    frozen.requires_grad_(False)
    assert Unit.of([trained, frozen], 2, stays=True) == Unit(
        weights=(18 + 2) * width, gradients=18 * 4, numel=17, stays=True
    )
