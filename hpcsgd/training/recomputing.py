"""Regions of a model that keep what comes into them alone, and compute the rest again in the backward pass.

"Training Deep Nets with Sublinear Memory Cost" (Chen et al., 2016), https://arxiv.org/abs/1604.06174: of n
layers alike, what is kept shrinks from n layers' values to n inputs and one layer's values, for one more
forward pass. Done by torch's `checkpoint`, which has chance (dropout) and autocast be as they were. Here
besides: running statistics are not added up a second time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute(regions: Iterable[nn.Module]) -> None:
    """Each by itself, to the same bits."""
    for region in regions:
        again = functools.partial(_contexts, region)
        region.forward = functools.partial(checkpoint, region.forward, use_reentrant=False, context_fn=again)


def _contexts(region: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Around the forward pass, and around the same again."""
    return nullcontext(), _on_copies_of_buffers(region)


@contextmanager
def _on_copies_of_buffers(region: nn.Module) -> Iterator[None]:
    own = [(module, dict(module._buffers)) for module in region.modules()]
    for module, buffers in own:
        module._buffers.update({name: x if x is None else x.clone() for name, x in buffers.items()})
    try:
        yield
    finally:
        for module, buffers in own:
            module._buffers.update(buffers)
