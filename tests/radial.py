"""Radial-directional averaging in plain torch, on whole tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from local_methods import step_with
from references import MakeOptimizer, Synchronize, model, set_vector, vector


def radial_directional(changes: Sequence[Tensor], weights: Sequence[float] | None = None) -> Tensor:
    """Return the radial-directional average of the changes of one tensor: the paper's definition."""
    w = torch.tensor(weights or [1.0] * len(changes), dtype=torch.float64)
    v = torch.stack([x.double().reshape(-1) for x in changes])
    norms = v.norm(dim=1)
    phi = torch.where(norms[:, None] > 0, v / norms[:, None], 0.0)
    radius, direction = (w @ norms) / w.sum(), (w @ phi) / w.sum()
    if direction.norm() < 1e-12:
        return ((w @ v) / w.sum()).view_as(changes[0])
    return (radius * direction / direction.norm()).view_as(changes[0])


def merged(changes: Sequence[Tensor], plain: bool) -> Tensor:
    """Return the average of the changes of one tensor; `plain`: it is an embedding, or named as one."""
    if plain or changes[0].dim() < 2:
        return torch.stack(list(changes)).mean(0)
    return radial_directional(changes)


def merging(every: int, make: MakeOptimizer, fewest: int = 2) -> Synchronize:
    """Return a synchronization with an outer step on the radial-directional average of the changes.

    There is none among less than `fewest` groups.
    """
    outer = model()
    optimizer = make(list(outer.parameters()))

    def synchronize(t: int, nets: list[nn.Module], _: float) -> None:
        if t % every or len(nets) < fewest:
            return
        for theta, *theirs in zip(*(net.parameters() for net in [outer, *nets]), strict=True):
            dimensions = getattr(theta, "dimensions", theta.dim())
            theta.grad = -merged([(w - theta).detach() for w in theirs], plain=dimensions < 2)
        step_with(optimizer, None)
        for net in nets:
            set_vector(net, vector(outer))

    return synchronize
