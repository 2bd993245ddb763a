"""Classification: cross-entropy, and the fraction of right answers."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import cross_entropy

from hpcsgd.data import Arrays, ImageDataset, ImageFiles
from hpcsgd.errors import count_text
from hpcsgd.train.tasks.task import Result, tally_of, unfit


class Classification:
    """The task for scores [b, c] of b samples, with at least one column per class, and y int64 [b]."""

    at_once = 512
    tokens = None
    tallied = 3

    def __init__(self, data: ImageDataset | Arrays | ImageFiles) -> None:
        self._data = data

    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(scores, y)

    def tally(self, scores: Tensor, y: Tensor) -> Tensor:
        """Return the sum of losses, the number of right answers and the number of samples: float64 [3]."""
        loss = cross_entropy(scores, y, reduction="sum")
        return tally_of(loss, (scores.argmax(1) == y).sum(), len(y))

    def result(self, tally: Tensor) -> Result:
        loss, right, count = tally.tolist()
        return Result(loss / count, {"accuracy": right / count})

    def require(self, scores: Tensor, x: Tensor, model: str) -> None:
        classes = len(self._data.classes)
        if scores.dim() != 2 or len(scores) != len(x) or scores.shape[1] < classes:
            raise unfit(
                model, scores, x, f"{self._data.path} has {count_text(classes, 'class')}", [len(x), classes]
            )
