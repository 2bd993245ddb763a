"""Which samples each rank sees: one shuffle an epoch, dealt out to the ranks like cards.

With π the permutation of epoch e and N ranks, rank r takes π[r], π[r + N], π[r + 2N], ... So where P = 1, K
ranks with batches of B/K hold together the plain batch of B consecutive samples; all ranks have equally many;
and the n mod N samples left out are others in each epoch.

Ranks may be given a larger share than 1/N: then shares overlap. After its own cards a rank takes those of the
next ones, from the beginning. So two ranks with 3/4 have half of all samples in common (EnsembleSync,
section 4.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch.utils.data
from numpy.typing import NDArray

from hpcsgd.errors import UserError


class _World(Protocol):
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...


class _Job(Protocol):
    @property
    def world(self) -> _World: ...


@dataclass(frozen=True)
class Seat:
    """One of `size` that samples are dealt to, where that is no rank of a job: a virtual rank, an island."""

    rank: int
    size: int

    @property
    def world(self) -> Seat:
        return self


class Sampler(torch.utils.data.Sampler[int]):
    """The indices of this rank's samples in one epoch; `set_epoch` goes to another.

    `data` is a dataset or its length n; `job` tells the rank and the number of ranks N. Iterating starts
    where training has come to: the loader reads ahead, so only `advance` moves that place. The state counts
    the samples of all ranks together; loaded with another N it goes on with exactly those not yet seen.
    `share`: the part of all samples that a rank sees in an epoch, by default 1/N.

    Raises `UserError` if there are fewer samples than ranks, or a share is less than 1/N or more than 1.
    """

    def __init__(
        self,
        data: Sized | int,
        job: _Job,
        *,
        seed: int = 0,
        shuffle: bool = True,
        share: float | None = None,
    ) -> None:
        self._total = data if isinstance(data, int) else len(data)
        self._rank, self._ranks = job.world.rank, job.world.size
        if self._total < self._ranks:
            raise UserError(
                f"{self._total} samples cannot be dealt to {self._ranks} ranks: each needs at least one"
            )
        if seed < 0:
            raise UserError(f"seed {seed}: must not be negative")
        if share is not None and not 1 / self._ranks <= share <= 1:
            raise UserError(f"share {share} of the samples: each of {self._ranks} ranks needs 1/N to 1")
        self._shuffle, self._share = shuffle, share
        self._seed, self._epoch, self._consumed = seed, 0, 0

    def deal(self, rank: int, ranks: int) -> None:
        """From here on the samples are for so many ranks, of which this is one."""
        self._rank, self._ranks = rank, ranks

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Go to an epoch, counted from 0, of which this rank has consumed `start` samples already."""
        if epoch < 0:
            raise UserError(f"epoch {epoch}: must not be negative")
        self._epoch, self._consumed = epoch, self._checked(start * self._ranks)

    def resume(self, consumed: int) -> None:
        """Go to where all ranks together have consumed so many samples of the epoch."""
        self._consumed = self._checked(consumed)

    def advance(self, samples: int) -> None:
        """Note that training has consumed `samples` more on this rank, and as many on every other one."""
        self._consumed = self._checked(self._consumed + samples * self._ranks)

    def __len__(self) -> int:
        return (self._dealt - self._consumed) // self._ranks

    def __iter__(self) -> Iterator[int]:
        if self._share is None:
            remaining = self._order()[self._consumed :]
            return iter(remaining[self._rank :: self._ranks][: len(self)].tolist())
        order, N = self._order(), self._ranks
        cards = np.concatenate([order[(self._rank + k) % N :: N] for k in range(N)])
        taken = self._consumed // N
        return iter(cards[taken : taken + len(self)].tolist())

    def state_dict(self) -> dict[str, int]:
        """Seed, epoch, and how many samples of the epoch all ranks together have consumed."""
        return {"seed": self._seed, "epoch": self._epoch, "consumed": self._consumed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go to where a `state_dict`, perhaps of another number of ranks, was taken."""
        self._consumed = self._checked(state["consumed"])
        self._seed, self._epoch = state["seed"], state["epoch"]

    @property
    def _dealt(self) -> int:
        """Cards of all ranks together: more than there are samples, where shares overlap."""
        if self._share is None:
            return self._total
        return self._ranks * max(int(self._share * self._total), self._total // self._ranks)

    def _checked(self, consumed: int) -> int:
        if not 0 <= consumed <= self._dealt:
            raise UserError(f"{consumed} samples consumed of an epoch of {self._dealt}: impossible")
        return consumed

    def _order(self) -> NDArray[np.int64]:
        if not self._shuffle:
            return np.arange(self._total)
        # Raw draws, sorted: unlike Generator.permutation, the same in every version of numpy.
        bits = np.random.PCG64(np.random.SeedSequence([self._seed, self._epoch]))
        return np.argsort(bits.random_raw(self._total), kind="stable")
