"""The Transformer's encoder as a language model: each token is predicted from the tokens before it.

"Attention Is All You Need" (Vaswani et al., 2017), https://arxiv.org/abs/1706.03762, sections 3.1 to 3.5.
A layer adds the result of attention to its input and normalizes the sum. Then it does the same with the
result of a perceptron of two layers. Embeddings are multiplied by √width, and positions are represented by
sines and cosines. There is no decoder, and a mask hides later tokens, as in PyTorch's example of a language
model on words. SelSync trains the model on WikiText-103 (section IV-A) with the sizes that are the defaults
here.
"""

from __future__ import annotations

from math import log, sqrt

import torch
from torch import Tensor, nn
from torch.nn.functional import relu, scaled_dot_product_attention

from hpcsgd.errors import UserError

BASE = 10_000.0
"""The base of the wavelengths of sines and cosines; see `positions`."""
SPREAD = 0.1
"""Initial weights of embedding and scores are uniform in ± this value."""


class Transformer(nn.Module):
    """The Transformer: token ids int64 [b, T] → scores of each position's next token [b, T, types]."""

    def __init__(
        self, types: int, width: int, layers: int, heads: int, hidden: int, dropout: float, tied: bool
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(types, width)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Layer(width, heads, hidden, dropout) for _ in range(layers))
        self.scores = nn.Linear(width, types)
        for module in self.modules():
            self._init_weights(module)
        if tied:
            self.scores.weight = self.embedding.weight

    def _init_weights(self, module: nn.Module) -> None:
        """Initialize `module`, a part of the model.

        `fully_shard` also calls this method, whose name is that in models of the library `transformers`.
        """
        if module is self.embedding or module is self.scores:
            nn.init.uniform_(module.weight, -SPREAD, SPREAD)  # pyright: ignore[reportArgumentType]
        if module is self.scores:
            nn.init.zeros_(self.scores.bias)
        if isinstance(module, Projections):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        width = self.embedding.embedding_dim
        found = self.embedding(x) * sqrt(width)
        found = self.dropout(found + positions(x.shape[1], width, x.device).to(found.dtype))
        for layer in self.layers:
            found = layer(found)
        return self.scores(found)


class Projections(nn.Linear):
    """The linear layer for queries, keys and values."""


class Layer(nn.Module):
    """A layer of the encoder: attention and a perceptron, with sums and normalizations.

    [b, T, width] → the same shape. The results of attention, and then of the perceptron, are added to the
    input, and each sum is normalized.
    """

    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(width, heads, dropout)
        self.first, self.second = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.dropout(self.attention(x)))
        return self.norm2(x + self.dropout(self.second(self.dropout(relu(self.first(x))))))


class Attention(nn.Module):
    """Causal attention, in which every token attends to itself and to the tokens before it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv, self.out = Projections(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, T, _ = x.shape
        q, k, v = self.qkv(x).view(b, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        found = scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(found.transpose(1, 2).flatten(2))


def positions(T: int, width: int, device: torch.device) -> Tensor:
    """Return the encodings of positions t = 0 … T − 1: float32 [T, width].

    Elements 2i and 2i + 1 are sine and cosine of t · BASE^(−2i / width).
    """
    frequencies = torch.exp(torch.arange(0, width, 2, device=device) * (-log(BASE) / width))
    angles = torch.outer(torch.arange(T, device=device, dtype=torch.float32), frequencies)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


def transformer(
    types: int,
    width: int = 200,
    layers: int = 2,
    heads: int = 2,
    hidden: int = 200,
    dropout: float = 0.2,
    tied: bool = False,
) -> Transformer:
    """Return a `Transformer` for a vocabulary of `types`, with `hidden` units in the perceptrons.

    `dropout` is the fraction of values dropped in training: of embeddings, attention weights and hidden
    units, and of results before they are added. With `tied`, embedding and scores share one matrix. Raises
    `UserError` for sizes that do not fit.
    """
    sizes = {"types": types, "width": width, "layers": layers, "heads": heads, "hidden": hidden}
    for name, value in sizes.items():
        if value < 1:
            raise UserError(f"transformer: {name} = {value}: must be at least 1")
    if not 0 <= dropout < 1:
        raise UserError(f"transformer: dropout = {dropout}: must be at least 0 and less than 1")
    if width % heads or width % 2:
        raise UserError(
            f"transformer: width = {width} and heads = {heads}: the width is even and a multiple of heads"
        )
    return Transformer(types, width, layers, heads, hidden, dropout, tied)
