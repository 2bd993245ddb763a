"""Partitions: how samples are divided among the P groups. A group is the papers' worker.

A partition assigns every group an ordered list of samples for an epoch. All lists have the same length. Rank
j of the K ranks of a group gets the samples j, j + K, j + 2K, … of the group's list. So the batches of B/K
samples of these ranks together are the next B samples of the list.

Without a partition, samples are assigned to ranks, whatever groups the ranks form (see `sampler`).
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
"""Indices of samples in the dataset."""


@dataclass(frozen=True)
class Samples:
    """The samples 0 … n − 1, which are divided among P groups.

    `seed` determines all random choices; without `shuffle` there are none. `labels` has the label of each
    sample, [n], or is None if labels are not known. `run` is the number of neighbouring samples that are read
    together.
    """

    n: int
    P: int
    seed: int
    shuffle: bool = True
    labels: Rows | None = None
    run: int = 1

    def of_epoch(self, epoch: int) -> Rows:
        """Return the indices of all samples, in the order of the given epoch."""
        return epoch_order(self.n, self.seed, epoch, self.run) if self.shuffle else np.arange(self.n)

    def shuffled(self, rows: Rows, purpose: Purpose, *of: int) -> Rows:
        if not self.shuffle:
            return rows
        if self.run > 1:
            rows = np.sort(rows)  # keep neighbours next to each other
        return shuffled(rows, self.seed, purpose, *of, run=self.run)


@runtime_checkable
class Partition(Protocol):
    """A rule that divides samples among groups. All ranks must use the same rule."""

    allows_elastic_groups: ClassVar[bool]
    """True if the number of groups may change during training, as with elastic groups of `hpcsgd launch`.

    In this case `Samples`, the group's index g and the epoch must alone determine the samples of a group.
    """

    def require(self, samples: Samples) -> None:
        """Raise `UserError` if this rule cannot divide `samples`."""

    def length(self, n: int, P: int) -> int:
        """Return the number of samples of each of P groups in an epoch, of n samples in total."""
        ...

    def assign(self, samples: Samples, g: int, epoch: int) -> Rows:
        """Return the samples of group g in the given epoch, in the order in which they are read."""
        ...


@checked
@dataclass(frozen=True)
class SelDP:
    """A partition that cuts each epoch's shuffle into P equal parts, which all groups visit in turn.

    Group g visits the parts g, g + 1, …, g − 1 (mod P). At any moment all groups are on different parts. In
    an epoch each group sees all samples, so an epoch has P times as many steps as with `DefDP`. The n mod P
    samples that belong to no part differ from epoch to epoch. The paper shuffles once, before training, and
    so has the same parts in every epoch.

    Example:
        >>> sampler = hpcsgd.Sampler(data, topology, partition=hpcsgd.SelDP())
        >>> len(sampler) * topology.group_size     # every group sees all 64 samples
        64

    References:
        S. Tyagi, M. Swany, IEEE CLUSTER 2023 (arXiv:2307.07950), section III-D.
    """

    allows_elastic_groups: ClassVar[bool] = False  # with another P a group would miss or repeat some parts

    def require(self, samples: Samples) -> None:
        """Accept any samples."""

    def length(self, n: int, P: int) -> int:
        return n // P * P

    def assign(self, samples: Samples, g: int, epoch: int) -> Rows:
        whole = samples.of_epoch(epoch)[: self.length(samples.n, samples.P)]
        return np.roll(whole.reshape(samples.P, -1), -g, axis=0).ravel()


@checked
@dataclass(frozen=True)
class Overlapping:
    """A partition in which every group sees a share of all samples, and groups share some of them.

    Each epoch's shuffle is distributed among the groups in turn, one sample at a time. After its own samples
    a group takes those of the next groups, from the beginning. So two groups with a share of 3/4 have half
    of all samples in common.

    Args:
        share: Part of all samples that a group sees in an epoch, 1/P to 1. With 1/P nothing overlaps.

    Raises:
        UserError: If `share` is outside these bounds; raised when a sampler is made.

    Example:
        >>> sampler = hpcsgd.Sampler(data, topology, partition=hpcsgd.Overlapping(share=0.75))
        >>> len(sampler) * topology.group_size     # three quarters of 64 samples
        48

    References:
        EnsembleSync, section 4.1: two workers with 37,500 of 50,000 samples each.
    """

    share: float

    allows_elastic_groups: ClassVar[bool] = True  # the samples of each epoch are divided anew

    def require(self, samples: Samples) -> None:
        if not 1 / samples.P <= self.share <= 1:
            raise UserError(
                f"share {self.share} of the samples: each of {count_text(samples.P, 'group')} needs 1/P to 1"
            )

    def length(self, n: int, P: int) -> int:
        return max(int(self.share * n), n // P)  # after a group has died, 1/P may exceed the share

    def assign(self, samples: Samples, g: int, epoch: int) -> Rows:
        order, P = samples.of_epoch(epoch), samples.P
        return np.concatenate([order[(g + k) % P :: P] for k in range(P)])[: self.length(samples.n, P)]


class OwnedByGroups(ABC):
    """A base class of partitions in which a group owns its samples and never sees others.

    All groups make equally many steps: an epoch is ⌊n/P⌋ samples of each group, however many it owns. A
    group goes through its samples pass by pass, each pass in another order. An epoch continues where the
    last one ended. So a group that owns more than ⌊n/P⌋ samples sees the rest in the next epoch. A group
    that owns fewer sees some twice.
    """

    allows_elastic_groups: ClassVar[bool] = False  # if a group left, no other group would see its samples

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
        """Return, for each group, the indices of those `samples` that it owns; every sample has one owner."""


@checked
@dataclass(frozen=True)
class DefDP(OwnedByGroups):
    """A partition that cuts the shuffled data once into P parts of equal size (±1), one per group.

    Each epoch has another order.

    Example:
        >>> sampler = hpcsgd.Sampler(data, topology, partition=hpcsgd.DefDP())
        >>> len(sampler) * topology.group_size     # one of two parts
        32

    References:
        The default that S. Tyagi, M. Swany, IEEE CLUSTER 2023, section III-D, set `SelDP` against.
    """

    def shares(self, samples: Samples) -> list[Rows]:
        return np.array_split(samples.shuffled(np.arange(samples.n), Purpose.SHARES), samples.P)


@checked
@dataclass(frozen=True)
class ByLabel(OwnedByGroups):
    """A partition by label: if groups and labels are equal in number, each group owns one label.

    With fewer groups than labels, each group owns several neighbouring labels. With more, several groups
    divide the samples of one label. Groups differ by at most one in their number of labels, and labels in
    their number of groups. An epoch is ⌊n/P⌋ samples of each group, however many it owns.

    Raises:
        UserError: If there are no labels or a group gets no sample; raised when a sampler is made.

    Example:
        >>> labels = data.tensors[1]
        >>> sampler = hpcsgd.Sampler(data, topology, partition=hpcsgd.ByLabel(), labels=labels)
        >>> seen = set(labels[list(sampler)].tolist())     # of three labels, among two groups
        >>> seen == ({0, 1} if topology.group_index == 0 else {2})
        True

    References:
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
    """A partition by label, in proportions drawn from Dir(alpha, …, alpha), as in federated learning.

    Groups own different numbers of samples. An epoch is ⌊n/P⌋ samples of each group.

    Args:
        alpha: Concentration of the distribution, > 0. Large: all groups have similar samples. Small, such as
            0.1: each group has few labels.

    Raises:
        UserError: If `alpha` is not a number > 0. When a sampler is made: if there are no labels or a group
            gets no sample.

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
"""The partitions, by their names in job files."""


def _by_label(samples: Samples, partition: Partition) -> list[Rows]:
    """Return, for each label that occurs, the indices of its samples, shuffled; labels ascend.

    Raises `UserError`, which names `partition`, if there is not one label per sample.
    """
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
