"""Language modelling: cross-entropy over tokens, and the perplexity, its exponential.

If the dataset file records the number of bytes of its text, there are also bits per byte. They are comparable
between models with different tokens.
"""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn.functional import cross_entropy

from hpcsgd.data import Windows
from hpcsgd.data.windows import IGNORED
from hpcsgd.train.tasks.task import Result, tally_of, unfit

SCORES_AT_ONCE = 1 << 25
"""Maximum number of scores in memory together: 128 MB of float32."""


class Language:
    """Next-token prediction: scores [b, bptt, types] for b windows of bptt tokens, y int64 [b, bptt].

    `types` is at least the number of token types. Positions where y is `IGNORED` do not count. No state is
    carried from window to window, so the first tokens of each window are predicted from little context.
    Perplexities are higher than those of models that carry state.
    """

    tallied = 2

    def __init__(self, data: Windows) -> None:
        self._data = data
        self.tokens = data.bptt
        self.at_once = max(1, SCORES_AT_ONCE // (data.bptt * data.types))

    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(scores.flatten(0, 1), y.flatten(), ignore_index=IGNORED)

    def tally(self, scores: Tensor, y: Tensor) -> Tensor:
        """Return the sum of losses and the number of tokens that count: float64 [2]."""
        loss = cross_entropy(scores.flatten(0, 1), y.flatten(), ignore_index=IGNORED, reduction="sum")
        return tally_of(loss, (y != IGNORED).sum())

    def result(self, tally: Tensor) -> Result:
        mean = tally[0] / tally[1]
        figures = {"perplexity": mean.exp().item()}
        if self._data.bytes is not None:
            figures["bits_per_byte"] = mean.item() / math.log(2) * self._data.tokens / self._data.bytes
        return Result(mean.item(), figures)

    def require(self, scores: Tensor, x: Tensor, model: str) -> None:
        types = self._data.types
        if scores.shape[:-1] != x.shape or scores.shape[-1] < types:
            raise unfit(model, scores, x, f"{self._data.path} has {types} types", [*x.shape, types])
