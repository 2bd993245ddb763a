"""The weights of a model's embeddings, which some methods treat unlike other matrices."""

from __future__ import annotations

from torch import nn


def embeddings_of(model: nn.Module) -> frozenset[nn.Parameter]:
    """Return the weights of the embeddings of `model`, which are found by the type of their module.

    An output layer that shares the weight of an embedding has the same parameter.
    """
    layers = (m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
    return frozenset(p for m in layers for p in m.parameters(recurse=False) if p.dim() == 2)
