"""The parts that a model is made of: what is compiled, computed again or sharded by itself."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def regions(model: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules that are made of others, without those that only contain them: residual blocks,
    the layers of a transformer, however deep its list of them lies. What such a list has is whole, also where
    it has lists of its own, as of experts."""
    for child in model.children():
        listed = isinstance(model, nn.ModuleList) or not any(map(_lists_regions, child.modules()))
        if isinstance(child, CONTAINERS) or not listed:
            yield from regions(child)
        elif _is_composite(child):
            yield child


def _lists_regions(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList) and any(map(_is_composite, module))


def _is_composite(module: nn.Module) -> bool:
    return any(True for _ in module.children())
