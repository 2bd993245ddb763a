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


def test_fragments_of_whole_vectors_are_those_of_all_shards() -> None:
    """A fragment has the same elements of the model, whether they are cut out of shards or out of `w`."""
    K, F = 3, 4
    ranks = [flatten(layers().named_parameters(), K, j, 100.0) for j in range(K)]
    model = [torch.arange(float(b.size)) for b in ranks[0]]
    wholes = fragments(ranks[0], F, whole=True)
    for p, fragment in enumerate(wholes):
        found: list[float] = []
        for buckets in ranks:
            shards = [b.shard_of(x) for b, x in zip(buckets, model, strict=True)]
            of_shards = fragments(buckets, F)[p].of(shards)
            found += torch.cat(of_shards).tolist()
        assert sorted(found) == sorted(torch.cat(fragment.of(model)).tolist())
    of_all = sorted(torch.cat([x for fragment in wholes for x in fragment.of(model)]).tolist())
    in_use = [x[: b.parameters.numel()] for b, x in zip(ranks[0], model, strict=True)]
    assert of_all == sorted(torch.cat(in_use).tolist())


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 2, bias=False))
