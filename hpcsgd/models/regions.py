"""Regions of a model: the parts that are compiled, recomputed or sharded separately."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def regions(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the regions: the outermost modules that consist of other modules, at any depth.

    Regions are, for example, residual blocks or the layers of a Transformer. A container, or a module with a
    `ModuleList` of such blocks, is not itself a region; the search continues inside it. Each element of such
    a list is one region, even if it has lists of its own, such as one of experts.
    """
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
