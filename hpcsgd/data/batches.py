"""A group's samples in batches of B, and the part of each batch that one of the group's K ranks reads.

B need not be a multiple of K: ranks may differ by one sample. The factor `weight` of a rank's loss makes the
mean of the ranks' gradients equal to the gradient of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch.utils.data

from hpcsgd.data.sampler import Sampler
from hpcsgd.data.split import Drawn

AHEAD = 32
"""Number of batches that are announced to the dataset together, and how many batches ahead of reading."""


class Batches(torch.utils.data.Sampler[list[int]]):
    """A batch sampler for `DataLoader(batch_sampler=...)` that yields what is left of the sampler's epoch.

    `sampler` yields the samples of a group, or with K = 1 those of a single rank. They are divided into
    batches of B. Rank j of the K ranks gets the samples j, j + K, j + 2K, … of each batch. A last batch of
    fewer than K samples is left out. For a `Stream` a last batch of fewer than B samples is left out.
    """

    def __init__(self, sampler: Sampler, B: int, K: int = 1, j: int = 0) -> None:
        assert B >= K
        self.sampler = sampler
        self.shares_samples = False
        """True if groups send each other a part of each batch, as `Injected` does."""
        self._B, self._K, self._j = B, K, j
        self._least = B if sampler.whole_batches else K

    @property
    def per_step(self) -> int:
        """Number of the sampler's samples that a step uses; the last step of an epoch may use fewer."""
        return self._B

    def __len__(self) -> int:
        whole, rest = divmod(len(self.sampler), self._B)
        return whole + (rest >= self._least)

    def __iter__(self) -> Iterator[list[int]]:
        rows, ahead = self.sampler.rows()[: len(self) * self._B], AHEAD * self._B
        seed, epoch = self.sampler.seed, self.sampler.epoch
        for start in range(0, len(rows), self._B):
            if start % ahead == 0:
                soon = rows[start + ahead if start else 0 : start + 2 * ahead]
                self.sampler.expect(soon[np.arange(len(soon)) % self._B % self._K == self._j])
            yield Drawn(rows[start : start + self._B][self._j :: self._K].tolist(), seed, epoch)

    def weight(self, samples: int) -> float:
        """Return the factor for this rank's mean loss over its `samples` samples of the current batch."""
        return samples * self._K / self._due

    def advance(self) -> None:
        """Move past the current batch, after all ranks of all groups have trained on it."""
        self.sampler.advance(self._due)

    def start_after(self, position: int, steps: int) -> None:
        """Continue after the sampler's `position` and `steps` further batches."""
        self.sampler.resume(position)
        for _ in range(steps):
            self.advance()

    @property
    def _due(self) -> int:
        return min(self._B, len(self.sampler))
