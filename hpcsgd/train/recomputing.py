"""Activation checkpointing: regions keep only inputs and recompute other values in the backward pass.

"Training Deep Nets with Sublinear Memory Cost" (Chen et al., 2016), https://arxiv.org/abs/1604.06174. With n
equal layers, memory shrinks from the values of n layers to n inputs and the values of one layer, for one more
forward pass. torch's `checkpoint` does the work, and restores the random state (dropout) and autocast. In
addition, the second pass here begins with the buffers of the first one and leaves them unchanged, so that
running statistics are updated once.
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
    """Make each region recompute its inner values in the backward pass, with the same bits."""
    for region in regions:
        again = functools.partial(_contexts, region)
        region.forward = functools.partial(checkpoint, region.forward, use_reentrant=False, context_fn=again)


def _contexts(region: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return contexts for the forward pass and its repetition. Both passes start from the same buffers."""
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
