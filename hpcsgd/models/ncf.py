"""NeuMF of "Neural Collaborative Filtering" (He et al., 2017): https://arxiv.org/abs/1708.05031.

The model predicts which items a user likes, from the numbers of user and item alone. It has two halves: a
product of embeddings (GMF, eqs. 8 and 9), and a perceptron on other embeddings (eq. 10). A linear layer (eq.
12) turns their outputs into a score. Differences from the paper: the loss applies the sigmoid, not the model.
The two halves are trained together from the beginning; the paper first trains each separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from hpcsgd.errors import UserError

DEVIATION = 0.01
"""Standard deviation of the initial embeddings (section 4.1 of the paper)."""


class NeuMF(nn.Module):
    """The NeuMF model: pairs of user and item, int64 [..., 2] → scores [...].

    A score is above 0 if the user is likely to have rated the item.
    """

    def __init__(self, users: int, items: int, factors: int, hidden: Sequence[int]) -> None:
        super().__init__()
        first, *rest = hidden
        self.product_user, self.product_item = _embedding(users, factors), _embedding(items, factors)
        self.deep_user, self.deep_item = _embedding(users, first // 2), _embedding(items, first // 2)
        layers: list[nn.Module] = []
        for before, after in pairwise([first, *rest]):
            layers += [nn.Linear(before, after), nn.ReLU()]
        self.deep = nn.Sequential(*layers)
        self.score = nn.Linear(factors + hidden[-1], 1)

    def forward(self, x: Tensor) -> Tensor:
        user, item = x.unbind(-1)
        product = self.product_user(user) * self.product_item(item)
        deep = self.deep(torch.cat([self.deep_user(user), self.deep_item(item)], -1))
        return self.score(torch.cat([product, deep], -1)).squeeze(-1)


def ncf(users: int, items: int, factors: int = 8, hidden: Sequence[int] = (64, 32, 16, 8)) -> NeuMF:
    """Return a `NeuMF` with `factors` in the product and layers of `hidden` units in the perceptron.

    `hidden[0]` is the size of the perceptron's input: one half is an embedding of the user, the other half
    of the item. Raises `UserError` for impossible sizes.
    """
    if min(users, items, factors) < 1:
        raise UserError(f"ncf: users = {users}, items = {items}, factors = {factors}: must be at least 1")
    if not hidden or min(hidden) < 1 or hidden[0] % 2:
        raise UserError(f"ncf: hidden = {list(hidden)}: sizes of 1 or more, the first one even")
    return NeuMF(users, items, factors, hidden)


def _embedding(rows: int, width: int) -> nn.Embedding:
    made = nn.Embedding(rows, width)
    nn.init.normal_(made.weight, std=DEVIATION)
    return made
