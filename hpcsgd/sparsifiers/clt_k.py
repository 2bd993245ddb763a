"""Cyclic local top-k: one worker after the other selects for all of them.

C. Chen et al.: ScaleCom: Scalable Sparsified Gradient Compression for Communication-Efficient Distributed
Training, NeurIPS 2020. In step t worker t mod n takes the top k of its own accumulated gradient and
broadcasts the indices. There is no build-up, but the others wait.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hpcsgd.sparsifiers.base import Accumulated, Share, require_density, wanted
from hpcsgd.transport import Transport


@dataclass(frozen=True)
class CLTk:
    """`density` (d): k = d·M, rounded, at least 1."""

    density: float
    disjoint = True

    def __post_init__(self) -> None:
        require_density(self.density)

    def cut(self, layers: Tensor, n: int) -> Tensor:
        return layers

    def share(self, x: Accumulated, t: int, workers: Transport) -> Share:
        M, leader = x.acc.numel(), t % workers.size
        return Share.whole(M, wanted(self.density, M) if workers.rank == leader else 0, leader)

    def select(self, x: Accumulated, share: Share) -> Tensor:
        return share.largest_of(x.acc)
