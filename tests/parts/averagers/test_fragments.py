"""Fragments: values of their elements are joined again."""

from __future__ import annotations

import torch
from torch import nn

from hpcsgd.core.flat import flatten
from hpcsgd.parts.averagers.fragments import fragments, put_together


def test_vectors_are_joined_as_wide_as_they_are() -> None:
    """The values that an averager keeps for 16-bit parameters are float32."""
    layers = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)).bfloat16()
    (bucket,) = flatten(layers.named_parameters(), 1, 0, 1e9)
    known = torch.randn(bucket.param_shard.numel(), dtype=torch.float32)
    pieces = [(fragment, fragment.of([known])) for fragment in fragments([bucket], 2)]
    assert all(len(mine) == 1 for _, mine in pieces)
    (joined,) = put_together([bucket.param_shard], pieces)
    assert joined.dtype == torch.float32
    assert torch.equal(joined, known)
    (nothing,) = put_together([bucket.param_shard], [])
    assert nothing.dtype == torch.bfloat16
