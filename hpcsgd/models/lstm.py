"""The classical recurrent language model: an embedding, LSTM layers, and a score for every token type.

"Recurrent Neural Network Regularization" (Zaremba et al., 2014), https://arxiv.org/abs/1409.2329: dropout
between layers, not along time. Tied weights: https://arxiv.org/abs/1608.05859. Both papers carry the state
from one segment of the text to the next. Here every window of tokens starts from a state of zeros, so that
samples can come in any order, to any rank.
"""

from __future__ import annotations

from torch import Tensor, nn

from hpcsgd.errors import UserError

SPREAD = 0.1
"""Initial weights of embedding and scores are uniform in ± this value; initial biases are 0."""


class LanguageModel(nn.Module):
    """The LSTM model: token ids int64 [b, T] → scores [b, T, types] of the next token after each."""

    def __init__(
        self, types: int, embedding: int, hidden: int, layers: int, dropout: float, tied: bool
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(types, embedding)
        between = dropout if layers > 1 else 0.0  # torch warns if there is nothing between layers
        self.lstm = nn.LSTM(embedding, hidden, layers, dropout=between, batch_first=True)
        self.scores = nn.Linear(hidden, types)
        self.dropout = nn.Dropout(dropout)
        nn.init.uniform_(self.embedding.weight, -SPREAD, SPREAD)
        nn.init.uniform_(self.scores.weight, -SPREAD, SPREAD)
        nn.init.zeros_(self.scores.bias)
        if tied:
            self.scores.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        found, _ = self.lstm(self.dropout(self.embedding(x)))
        return self.scores(self.dropout(found))


def lstm(
    types: int,
    embedding: int = 200,
    hidden: int = 200,
    layers: int = 2,
    dropout: float = 0.2,
    tied: bool = False,
) -> LanguageModel:
    """Return a `LanguageModel` for a vocabulary of `types`.

    The default sizes are those of PyTorch's old example. `dropout` is the fraction of values dropped before,
    between and after the layers in training. With `tied`, embedding and scores share one matrix, which needs
    `embedding` = `hidden`. Raises `UserError` for sizes that do not fit.
    """
    for name, value in (("types", types), ("embedding", embedding), ("hidden", hidden), ("layers", layers)):
        if value < 1:
            raise UserError(f"lstm: {name} = {value}: must be at least 1")
    if not 0 <= dropout < 1:
        raise UserError(f"lstm: dropout = {dropout}: must be at least 0 and less than 1")
    if tied and embedding != hidden:
        raise UserError(f"lstm: tied weights need embedding = hidden, not {embedding} and {hidden}")
    return LanguageModel(types, embedding, hidden, layers, dropout, tied)
