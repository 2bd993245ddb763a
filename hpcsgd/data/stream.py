"""Datasets whose samples are read in runs of neighbours."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray


@runtime_checkable
class Stream(Protocol):
    """A dataset whose samples are consecutive parts of something long, such as a text.

    All batches of an epoch are whole, so that a step has the same samples for every number of ranks.
    """

    @property
    def run_length(self) -> int:
        """Number of neighbouring samples that are read together."""
        ...

    def expect(self, rows: NDArray[np.int64]) -> None:
        """Announce that the samples `rows` will be read soon, so that the dataset can read ahead."""
        ...
