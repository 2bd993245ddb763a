"""How samples are divided among the P groups; a group is the papers' worker.

A partition gives every group a hand of samples for an epoch, in order and as many as every other group. The K
ranks of a group take the hand in turn, like cards: position j the samples j, j + K, j + 2K, … of it. So ranks
with batches of B/K hold together the next B samples of the hand.

Without a partition samples are dealt to ranks, whatever groups these form (see `sampler`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from hpcsgd.arguments import checked
from hpcsgd.data.rng import Purpose, dirichlet, epoch_order, shuffled
from hpcsgd.errors import UserError, count_text

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Samples:
    """What is divided: the samples 0 … n − 1 among P groups. All chance is by `seed`; without `shuffle` there
    is none. `labels` [n], where they are known. So many neighbours as a `run` has are read at one go."""

    n: int
    P: int
    seed: int
    shuffle: bool = True
    labels: Rows | None = None
    run: int = 1

    def of_epoch(self, epoch: int) -> Rows:
        """All of them, in the order that belongs to an epoch."""
        return epoch_order(self.n, self.seed, epoch, self.run) if self.shuffle else np.arange(self.n)

    def shuffled(self, rows: Rows, purpose: Purpose, *of: int) -> Rows:
        if not self.shuffle:
            return rows
        if self.run > 1:
            rows = np.sort(rows)  # neighbours beside each other
        return shuffled(rows, self.seed, purpose, *of, run=self.run)


@runtime_checkable
class Partition(Protocol):
    """How samples are divided among groups; the same on all ranks."""

    allows_elastic_groups: ClassVar[bool]
    """Whether the number of groups may change while they train, as with groups that `hpcsgd launch` starts.
    Then what a group sees in an epoch must follow from `Samples`, g and the epoch alone."""

    def require(self, samples: Samples) -> None:
        """Raise `UserError` where these cannot be divided so."""

    def length(self, n: int, P: int) -> int:
        """Samples of every hand."""
        ...

    def assign(self, samples: Samples, g: int, epoch: int) -> Rows:
        """The samples of group g in an epoch, in order."""
        ...


@checked
@dataclass(frozen=True)
class SelDP:
    """Each epoch's shuffle is cut into P equal chunks; group g visits chunks g, g + 1, …, g − 1 (mod P).

    At any moment all groups are on different chunks, and in an epoch each of them sees all samples: an epoch
    is P times as many steps as with `DefDP`. The n mod P samples that belong to no chunk are others in each
    epoch. The paper shuffles once, before training, and so has the same chunks in every epoch.

    Not to be confused with `DefDP`, where a group sees its own chunk and no other.

    Example:
        >>> sampler = hpcsgd.Sampler(data, topology, partition=hpcsgd.SelDP())
        >>> len(sampler) * topology.group_size     # every group sees all 64 samples
        64

    Source:
        S. Tyagi, M. Swany, IEEE CLUSTER 2023 (arXiv:2307.07950), section III-D.
    """

    allows_elastic_groups: ClassVar[bool] = False  # chunks of another size would be visited twice, or never

    def require(self, samples: Samples) -> None:
        """Any samples will do."""

    def length(self, n: int, P: int) -> int:
        return n // P * P

    def assign(self, samples: Samples, g: int, epoch: int) -> Rows:
        whole = samples.of_epoch(epoch)[: self.length(samples.n, samples.P)]
        return np.roll(whole.reshape(samples.P, -1), -g, axis=0).ravel()


@checked
@dataclass(frozen=True)
class Overlapping:
    """Every group sees a share of all samples in an epoch, some of which others see, too.

    Each epoch's shuffle is dealt to the groups like cards. After its own cards a group takes those of the
    next ones, from the beginning. So two groups with 3/4 have half of all samples in common.

    Not to be confused with `Injection`, by which groups send each other samples.

    Args:
        share: of all samples, 1/P to 1; with 1/P nothing overlaps.

    Raises:
        UserError: when a sampler is made, for a share outside these bounds.

    Example:
        >>> sampler = hpcsgd.Sampler(data, topology, partition=hpcsgd.Overlapping(share=0.75))
        >>> len(sampler) * topology.group_size     # three quarters of 64 samples
        48

    Source:
        EnsembleSync, section 4.1: two workers with 37,500 of 50,000 samples each.
    """

    share: float

    allows_elastic_groups: ClassVar[bool] = True  # each epoch is dealt anew

    def require(self, samples: Samples) -> None:
        if not 1 / samples.P <= self.share <= 1:
            raise UserError(
                f"share {self.share} of the samples: each of {count_text(samples.P, 'group')} needs 1/P to 1"
            )

    def length(self, n: int, P: int) -> int:
        return max(int(self.share * n), n // P)  # where groups have died, 1/P may have come to be more

    def assign(self, samples: Samples, g: int, epoch: int) -> Rows:
        order, P = samples.of_epoch(epoch), samples.P
        return np.concatenate([order[(g + k) % P :: P] for k in range(P)])[: self.length(samples.n, P)]


class OwnedByGroups(ABC):
    """Every group owns samples, once and for all, and never sees others.

    All groups make equally many steps: an epoch is ⌊n/P⌋ samples of each, whatever it owns. A group goes
    through its own pass by pass, each pass in another order, and an epoch goes on where the last one ended.
    So a group that owns more sees the others of them in the next epoch; one that owns fewer sees some again.
    """

    allows_elastic_groups: ClassVar[bool] = False  # nobody else would see what a group owns that has left

    def require(self, samples: Samples) -> None:
        for g, own in enumerate(self.shares(samples)):
            if not len(own):
                raise UserError(
                    f"{self}: none of {count_text(samples.n, 'sample')} for group {g} of {samples.P}"
                )

    def length(self, n: int, P: int) -> int:
        return n // P

    def assign(self, samples: Samples, g: int, epoch: int) -> Rows:
        own, length = self.shares(samples)[g], self.length(samples.n, samples.P)
        first, start = divmod(epoch * length, len(own))
        passes = range(first, first + -(-(start + length) // len(own)))
        turns = [samples.shuffled(own, Purpose.PASS, g, number) for number in passes]
        return np.concatenate(turns)[start : start + length]

    @abstractmethod
    def shares(self, samples: Samples) -> list[Rows]:
        """What each group owns of `samples`: all of them, each once."""


@checked
@dataclass(frozen=True)
class DefDP(OwnedByGroups):
    """The shuffled data cut once into P chunks of equal size (±1); group g sees only chunk g.

    In each epoch in another order.

    Not to be confused with a sampler without a partition: that deals all samples anew in every epoch.

    Example:
        >>> sampler = hpcsgd.Sampler(data, topology, partition=hpcsgd.DefDP())
        >>> len(sampler) * topology.group_size     # one of two chunks
        32

    Source:
        The default that S. Tyagi, M. Swany, IEEE CLUSTER 2023, section III-D, set `SelDP` against.
    """

    def shares(self, samples: Samples) -> list[Rows]:
        return np.array_split(samples.shuffled(np.arange(samples.n), Purpose.SHARES), samples.P)


@checked
@dataclass(frozen=True)
class ByLabel(OwnedByGroups):
    """Label by label: with as many groups as labels each group has one of them.

    With fewer groups each has several labels, next to each other; with more, a label is divided among several
    groups. How many differs by at most one where the numbers do not divide each other. An epoch is ⌊n/P⌋
    samples of each group, whatever it owns.

    Not to be confused with `Dirichlet`, where every group may have some of each label.

    Raises:
        UserError: when a sampler is made, without labels or where a group gets no sample.

    Example:
        >>> labels = data.tensors[1]
        >>> sampler = hpcsgd.Sampler(data, topology, partition=hpcsgd.ByLabel(), labels=labels)
        >>> seen = set(labels[list(sampler)].tolist())     # of three labels, among two groups
        >>> seen == ({0, 1} if topology.group_index == 0 else {2})
        True

    Source:
        S. Tyagi, M. Swany, IEEE CLUSTER 2023, section III-E.
    """

    def shares(self, samples: Samples) -> list[Rows]:
        by_label, P = _by_label(samples, self), samples.P
        C = len(by_label)
        if P <= C:
            return [np.concatenate([by_label[c] for c in range(C) if c * P // C == g]) for g in range(P)]
        sharing = [sum(g * C // P == c for g in range(P)) for c in range(C)]
        return [part for c, rows in enumerate(by_label) for part in np.array_split(rows, sharing[c])]


@checked
@dataclass(frozen=True)
class Dirichlet(OwnedByGroups):
    """The samples of each label are divided by proportions drawn from Dir(alpha, …, alpha).

    Groups own unlike numbers of samples; an epoch is ⌊n/P⌋ samples of each group all the same.

    As is usual in federated learning. Not to be confused with `ByLabel`, which the papers here use and which
    draws nothing.

    Args:
        alpha: > 0. Large: all groups have much the same samples; small, as 0.1: few labels each.

    Raises:
        UserError: for another alpha; when a sampler is made, without labels or where a group gets no sample.

    Example:
        >>> partition = hpcsgd.Dirichlet(alpha=0.5)
        >>> sampler = hpcsgd.Sampler(data, topology, seed=1, partition=partition, labels=data.tensors[1])
        >>> len(sampler)
        16
    """

    alpha: float

    def __post_init__(self) -> None:
        if not (self.alpha > 0 and isfinite(self.alpha)):
            raise UserError(f"alpha = {self.alpha}: must be a number > 0", key="alpha", value=self.alpha)

    def shares(self, samples: Samples) -> list[Rows]:
        by_label = _by_label(samples, self)
        proportions = dirichlet(self.alpha, (len(by_label), samples.P), samples.seed)
        dealt = [_cut(rows, parts) for rows, parts in zip(by_label, proportions, strict=True)]
        return [np.concatenate([parts[g] for parts in dealt]) for g in range(samples.P)]


PARTITIONS: Mapping[str, Callable[..., Partition]] = {
    "by_label": ByLabel,
    "defdp": DefDP,
    "dirichlet": Dirichlet,
    "overlapping": Overlapping,
    "seldp": SelDP,
}
"""What they are called in a job file."""


def _by_label(samples: Samples, partition: Partition) -> list[Rows]:
    """The rows of each label that occurs, in the order of the labels; shuffled, once."""
    labels = samples.labels
    if labels is None or labels.shape != (samples.n,):
        given = "none are given" if labels is None else f"given are labels of shape {labels.shape}"
        raise UserError(f"{partition} divides {count_text(samples.n, 'sample')} by their labels: {given}")
    order = np.argsort(labels, kind="stable")
    _, starts = np.unique(labels[order], return_index=True)
    parts = np.split(order, starts[1:])
    return [samples.shuffled(rows, Purpose.SHARES, c) for c, rows in enumerate(parts)]


def _cut(rows: Rows, proportions: NDArray[np.float64]) -> list[Rows]:
    return np.split(rows, (np.cumsum(proportions)[:-1] * len(rows)).astype(np.int64))
