"""Recommendation: binary cross-entropy, and how often the right item is among the first ten.

"Neural Collaborative Filtering" (https://arxiv.org/abs/1708.05031, sections 3.1.1 and 4.1): an item that the
user has rated should score higher than others. HR@10 is the fraction of users for whom this item has one of
the ten highest scores. In NDCG@10 it then counts 1/log2(place + 1), where the highest score has place 1.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from hpcsgd.data import Ratings
from hpcsgd.train.tasks.task import Result, tally_of, unfit

FIRST = 10


class Recommendation:
    """The task for scores [b, m] of m items for each of b users, before the sigmoid, and y float32 [b, m].

    Column 0 is the item that the user has rated: there y is 1, and 0 in all other columns.
    """

    at_once = 512
    tokens = None
    tallied = 4

    def __init__(self, data: Ratings) -> None:
        self._data = data

    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        return binary_cross_entropy_with_logits(scores, y)

    def tally(self, scores: Tensor, y: Tensor) -> Tensor:
        """Return the sums of the users' losses, HR@10 terms and NDCG@10 terms, and the number of users.

        A user's loss is the mean over the m items. Items with the same score as the rated one are placed
        before it, so that a model that gives all items the same score has no hits.
        """
        loss = binary_cross_entropy_with_logits(scores, y, reduction="sum") / y.shape[1]
        place = 1 + (scores[:, 1:] >= scores[:, :1]).sum(1)
        hits = place <= FIRST
        gains = (hits / torch.log2(place.double() + 1)).sum()
        return tally_of(loss, hits.sum(), gains, len(y))

    def result(self, tally: Tensor) -> Result:
        loss, hits, gains, count = tally.tolist()
        return Result(loss / count, {"hr10": hits / count, "ndcg10": gains / count})

    def require(self, scores: Tensor, x: Tensor, model: str) -> None:
        if scores.shape != x.shape[:-1]:
            why = f"{self._data.path} has pairs of user and item, and each needs one"
            raise unfit(model, scores, x, why, list(x.shape[:-1]))
