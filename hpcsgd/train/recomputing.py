"""Regions of a model that keep what comes into them alone, and compute the rest again in the backward pass.

"Training Deep Nets with Sublinear Memory Cost" (Chen et al., 2016), https://arxiv.org/abs/1604.06174: of n
layers alike, what is kept shrinks from n layers' values to n inputs and one layer's values, for one more
forward pass. Done by torch's `checkpoint`, which has chance (dropout) and autocast be as they were. Here
besides: the second pass begins with the buffers of the first one, and leaves none, so that running statistics
are added up once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hpcsgd import torch_private

Buffers = dict[str, Tensor | None]


def recompute(regions: Iterable[nn.Module]) -> None:
    """Each by itself, to the same bits."""
    for region in regions:
        again = functools.partial(_contexts, region)
        region.forward = functools.partial(checkpoint, region.forward, use_reentrant=False, context_fn=again)


def _contexts(region: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Around the forward pass, and around the same again: from the same buffers, and leaving them alone."""
    begun: list[Buffers] = []
    return _remembered(region, begun), _on_copies(region, begun)


@contextmanager
def _remembered(region: nn.Module, begun: list[Buffers]) -> Iterator[None]:
    begun[:] = [_copied(torch_private.buffers_of(module)) for module in region.modules()]
    yield


@contextmanager
def _on_copies(region: nn.Module, begun: list[Buffers]) -> Iterator[None]:
    own = [(module, dict(torch_private.buffers_of(module))) for module in region.modules()]
    for (module, _), buffers in zip(own, begun, strict=True):
        torch_private.buffers_of(module).update(_copied(buffers))
    try:
        yield
    finally:
        for module, buffers in own:
            torch_private.buffers_of(module).update(buffers)


def _copied(buffers: Buffers) -> Buffers:
    return {name: x if x is None else x.clone() for name, x in buffers.items()}
