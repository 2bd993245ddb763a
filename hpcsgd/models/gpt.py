"""A decoder-only Transformer: each token is predicted from the tokens before it.

"Language Models are Unsupervised Multitask Learners" (Radford et al., 2019), GPT-2: blocks of attention and
perceptron, each with a normalization before it. The sizes of the presets and the initial weights are from
this paper, too. With these weights the sum over all blocks does not grow with the number of blocks.

Differences from the paper, as in most models since: positions are represented by rotation of queries and keys
(RoFormer, https://arxiv.org/abs/2104.09864, eqs. 15 and 34), so that texts may have any length. The model has
RMSNorm (https://arxiv.org/abs/1910.07467) and no biases.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from hpcsgd.errors import UserError, near_miss

PRESETS: Mapping[str, tuple[int, int, int]] = {"small": (768, 12, 12), "medium": (1024, 24, 16)}
"""Width, layers and heads of each preset.

With 50,257 types and tied weights, the models have 124 and 354 million parameters.
"""
BASE = 10_000.0
"""The base of the angles by which queries and keys are rotated; see `rotation`."""
SPREAD = 0.02
"""Standard deviation of the initial weights."""
EPSILON = 1e-5
"""The number that RMSNorm adds to the mean square."""


class GPT(nn.Module):
    """The GPT model: token ids int64 [b, T] → scores [b, T, types] of the next token after each."""

    def __init__(self, types: int, width: int, layers: int, heads: int, dropout: float, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(types, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.RMSNorm(width, EPSILON)
        self.scores = nn.Linear(width, types, bias=False)
        self._per_head = width // heads
        for module in self.modules():
            self._init_weights(module)
        if tied:
            self.scores.weight = self.embedding.weight

    def _init_weights(self, module: nn.Module) -> None:
        """Initialize `module`, a part of the model.

        `fully_shard` also calls this method, whose name is that in models of the library `transformers`.
        """
        if isinstance(module, nn.Linear | nn.Embedding):
            std = SPREAD / (2 * len(self.blocks)) ** 0.5 if isinstance(module, IntoTheSum) else SPREAD
            nn.init.normal_(module.weight, std=std)

    def forward(self, x: Tensor) -> Tensor:
        turn = rotation(x.shape[1], self._per_head, x.device)
        found = self.dropout(self.embedding(x))
        for block in self.blocks:
            found = block(found, turn)
        return self.scores(self.norm(found))


class IntoTheSum(nn.Linear):
    """The last linear layer of an attention or perceptron: its result is added to the block's input."""


class Block(nn.Module):
    """A Transformer block, which adds the result of attention, and then of a perceptron, to its input.

    [b, T, width] → the same shape.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.before_attention, self.before_perceptron = (nn.RMSNorm(width, EPSILON) for _ in range(2))
        self.attention = Attention(width, heads, dropout)
        self.perceptron = Perceptron(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.before_attention(x), turn))
        return x + self.dropout(self.perceptron(self.before_perceptron(x)))


class Attention(nn.Module):
    """Causal attention, in which every token attends to itself and to the tokens before it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = IntoTheSum(width, width, bias=False)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        b, T, _ = x.shape
        q, k, v = self.qkv(x).view(b, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        found = scaled_dot_product_attention(
            turned(q, turn), turned(k, turn), v, dropout_p=dropout, is_causal=True
        )
        return self.out(found.transpose(1, 2).flatten(2))


class Perceptron(nn.Module):
    """Two linear layers with GELU between them, applied to each token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, 4 * width, bias=False)
        self.out = IntoTheSum(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(gelu(self.first(x)))


def rotation(T: int, width: int, device: torch.device) -> Tensor:
    """Return cosine and sine of t · BASE^(−2i / width) for position t, pair i: float32 [2, T, width / 2]."""
    frequencies = BASE ** -(torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)
    angles = torch.outer(torch.arange(T, device=device, dtype=torch.float32), frequencies)
    return torch.stack([angles.cos(), angles.sin()])


def turned(x: Tensor, turn: Tensor) -> Tensor:
    """Return x [..., T, width] with each pair (x_i, x_(i + width/2)) rotated by its position's angle."""
    cos, sin = turn
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


def gpt(
    types: int,
    preset: str | None = None,
    *,
    width: int | None = None,
    layers: int | None = None,
    heads: int | None = None,
    dropout: float = 0.0,
    tied: bool = True,
) -> GPT:
    """Return a `GPT` for a vocabulary of `types`, with the sizes of a preset or your own.

    Presets are "small" and "medium". Without a preset, default sizes are width 128, 4 layers and 4 heads.
    `dropout` is the fraction of values dropped in training. With `tied`, embedding and scores share one
    matrix. Raises `UserError` for sizes that do not fit.
    """
    if preset is not None and preset not in PRESETS:
        raise UserError(f"gpt: no preset {preset!r}; {near_miss(preset, PRESETS)}")
    sizes = (128, 4, 4) if preset is None else PRESETS[preset]
    given = (width, layers, heads)
    width, layers, heads = (
        default if own is None else own for own, default in zip(given, sizes, strict=True)
    )
    for name, value in (("types", types), ("width", width), ("layers", layers), ("heads", heads)):
        if value < 1:
            raise UserError(f"gpt: {name} = {value}: must be at least 1")
    if not 0 <= dropout < 1:
        raise UserError(f"gpt: dropout = {dropout}: must be at least 0 and less than 1")
    if width % (2 * heads):
        raise UserError(
            f"gpt: width = {width} and heads = {heads}: each head needs an even part of the width"
        )
    return GPT(types, width, layers, heads, dropout, tied)
