"""The sampler: which samples each rank sees. It distributes one shuffle per epoch among the ranks.

Let π be the random order of the n samples in an epoch. Of N ranks, rank r gets π[r], π[r + N], π[r + 2N], …
So in a single group, the batches of B/K samples of the K ranks together are the next B samples of π. All
ranks have the same number of samples. The n mod N samples left out differ from epoch to epoch.

A `Partition` divides the samples among groups instead.

Windows of a text are shuffled in runs of neighbours, so that a text larger than memory is read at the speed
of the disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any

import numpy as np
import torch.utils.data
from numpy.typing import NDArray
from torch import Tensor

from hpcsgd.arguments import checked
from hpcsgd.comm.alike import note
from hpcsgd.core.topology import Topology
from hpcsgd.data.arguments import digest_of, partition_text, whole_number
from hpcsgd.data.assignment import Assignment, length_of
from hpcsgd.data.drawing import Drawing, Stream, drawn, require_whole
from hpcsgd.data.partition import Partition, Samples
from hpcsgd.errors import UserError, count_text


@checked
class Sampler(torch.utils.data.Sampler[int]):
    """A sampler that yields the indices of this rank's samples in one epoch.

    Without a partition rank r of N takes π[r], π[r + N], π[r + 2N], … of the epoch's shuffle π. The n mod N
    samples left out differ from epoch to epoch. `set_epoch` goes to another epoch. Iterating starts at the
    position that training has reached. Only `advance` moves it, because the loader reads ahead. The state
    counts the samples of all ranks together. With another N, a sampler that loads it continues with exactly
    the samples that no rank has seen yet.

    With a partition and another K, each group continues with exactly the samples that it has not seen yet.
    With another P or another partition, groups have other samples. Each group then skips the same fraction of
    its new samples, so that in this epoch some samples come again and some do not come.

    `data` may be another sampler, such as torch's `WeightedRandomSampler` or one that sorts by length. Then
    the ranks divide what that sampler draws. It draws the same on all ranks: the random generators of the
    process, and its own, are seeded for it by `seed` and epoch. All its epochs must have the same length. If
    it draws batches, the ranks divide whole batches, for `DataLoader(batch_sampler=…)`.

    Args:
        data: A dataset with a length, the length n alone, or another sampler. A `Stream` is shuffled in runs.
        topology: The ranks and groups, from `init`.
        seed: Seed of the shuffles, 0 or more, the same on all ranks. Default 0.
        shuffle: If true, each epoch has its own order. Default True; use False for evaluations.
        partition: How samples are divided among groups: `SelDP()`, `DefDP()`, `ByLabel()`,
            `Dirichlet(alpha)` or `Overlapping(share)`. Default None: all samples are divided among all
            ranks.
        labels: One label per sample, for partitions by label. Default None.
        drop_last: If true, n mod N samples are left out. Default True. With False no sample is left out, and
            some ranks have one sample more than others: for evaluations.

    Raises:
        UserError: If there are fewer samples than ranks, the partition is impossible, or `data` is a sampler
            that divides samples among ranks itself.

    Shape:
        `labels` is [n], as a tensor, an array or a sequence of integers.

    Example:
        >>> sampler = hpcsgd.Sampler(data, topology)
        >>> loader = DataLoader(data, batch_size=8, sampler=sampler)
        >>> for epoch in range(2):
        ...     sampler.set_epoch(epoch)
        ...     for x, y in loader:
        ...         pass
        >>> len(sampler), len(data)     # four ranks
        (16, 64)
    """

    def __init__(
        self,
        data: Sized | int | Drawing,
        topology: Assignment,
        *,
        seed: int = 0,
        shuffle: bool = True,
        partition: Partition | None = None,
        labels: Sequence[int] | NDArray[np.int64] | Tensor | None = None,
        drop_last: bool = True,
    ) -> None:
        self._total = length_of(data)
        self._ranks = topology.world.size
        if self._total < self._ranks and drop_last:
            raise UserError(
                f"{count_text(self._total, 'sample')} cannot be divided among "
                f"{count_text(self._ranks, 'rank')}: each needs at least one"
            )
        seed = whole_number("seed", seed)
        self._drawing = data if isinstance(data, torch.utils.data.Sampler) else None
        if self._drawing is not None:
            require_whole(self._drawing, Sampler)
        if partition is not None and (self._drawing is not None or not drop_last):
            raise UserError("partition: needs a dataset, not a sampler, and drop_last=True")
        self._drop_last = drop_last
        self._job = topology if isinstance(topology, Topology) else None
        self._partition = partition
        self._labels = None if labels is None else np.asarray(labels)
        self._shuffle = shuffle
        self._stream = data if isinstance(data, Stream) else None
        self._seed, self._epoch, self._consumed = seed, 0, 0
        if partition is None:
            self.assigned(topology.world.rank, topology.world.size)
        else:
            self._P, self._K = topology.num_groups, topology.group_size
            self._g, self._j = topology.group_index, topology.shard_index
            partition.require(self._samples)

    def assigned(self, rank: int, ranks: int) -> None:
        """From now on divide samples among `ranks` ranks, each a group of one; this rank is number `rank`."""
        self._P, self._K, self._g, self._j = ranks, 1, rank, 0
        self._ranks = ranks

    @property
    def samples(self) -> int | None:
        """Number of samples of the data, or None if another sampler draws them."""
        return None if self._drawing is not None else self._total

    @property
    def seed(self) -> int:
        """Seed of the shuffles."""
        return self._seed

    @property
    def epoch(self) -> int:
        """The epoch that iterating goes through, counted from 0."""
        return self._epoch

    @property
    def whole_batches(self) -> bool:
        """True if an epoch ends after its last whole batch, without the samples that are left over."""
        return self._stream is not None

    @property
    def taken(self) -> int:
        """Number of samples of the epoch that this rank has consumed."""
        return self._consumed // self._ranks

    @checked
    def set_epoch(self, epoch: int, start: int | None = None) -> None:
        """Go to `epoch`, counted from 0, of which this rank has already consumed `start` samples.

        If `start` is None, another epoch begins at 0, and the present one stays where it is. Raises
        `UserError` for a negative epoch, or for more samples than an epoch has.
        """
        epoch = whole_number("epoch", epoch)
        if start is not None or epoch != self._epoch:
            self._epoch, self._consumed = epoch, self._checked((start or 0) * self._ranks)

    @property
    def position(self) -> int:
        """The position in the epoch, which does not depend on the number of groups.

        It is the number of samples that all ranks together have consumed, or with a partition each group.
        """
        return self._consumed if self._partition is None else self._consumed // self._P

    def resume(self, position: int) -> None:
        """Go to the `position` of a sampler that may have another number of groups."""
        if self._partition is not None:  # groups may have fewer samples now
            position = min(position * self._P, self._assigned)
        self._consumed = self._checked(position)

    def advance(self, samples: int) -> None:
        """Count `samples` further samples of every rank as consumed, at most those that are left."""
        consumed = self._consumed + samples * self._ranks
        self._consumed = self._checked(consumed if self._drop_last else min(consumed, self._assigned))

    def __len__(self) -> int:
        left = self._assigned - self._consumed
        return left // self._ranks if self._drop_last else max(0, -((self._g - left) // self._ranks))

    def __iter__(self) -> Iterator[Any]:
        left = self._used()
        return iter(left if isinstance(left, list) else left.tolist())

    def rows(self) -> NDArray[np.int64]:
        """Return the indices that iterating yields. Raises `UserError` if it yields batches."""
        left = self._used()
        if isinstance(left, list) and any(not isinstance(row, int) for row in left):
            raise UserError(
                f"{type(self._drawing).__name__} draws batches: give the hpcsgd.Sampler to DataLoader, as "
                "batch_sampler"
            )
        return np.asarray(left, np.int64)

    def expect(self, rows: NDArray[np.int64]) -> None:
        """Announce to the dataset, if it is a `Stream`, that the samples `rows` will be read soon."""
        if self._stream is not None:
            self._stream.expect(rows)

    def state_dict(self) -> dict[str, int]:
        """Return seed, epoch, samples consumed by all ranks, and the numbers of samples and of ranks.

        With a partition, the state also has the number of samples that are assigned in an epoch.
        """
        state = {
            "seed": self._seed, "epoch": self._epoch, "consumed": self._consumed,
            "samples": self._total, "ranks": self._ranks,
        }  # fmt: skip
        return state if self._partition is None else {**state, "dealt": self._assigned}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue at the position of `state`, which may be of other numbers of groups and ranks.

        Raises:
            UserError: If the state is in the middle of an epoch with another number of samples.
        """
        if "samples" not in state:
            raise UserError("this state of a sampler is of an older version of hpcsgd")
        consumed, dealt = state["consumed"], state.get("dealt", state["samples"])
        if state["samples"] != self._total:
            consumed = self._assigned if self._is_over(state, dealt) else 0
        elif self._partition is not None:  # skip the same fraction of each group's samples
            consumed = self._assigned // self._P * consumed // dealt * self._P
        elif dealt != self._assigned:
            consumed = self._assigned * consumed // dealt
        self._consumed = self._checked(consumed)
        self._seed, self._epoch = state["seed"], state["epoch"]

    def _is_over(self, state: Mapping[str, int], dealt: int) -> bool:
        """Return True if `state` is at the end of an epoch, False if at its start; else raise `UserError`."""
        over = dealt - state["consumed"] < state["ranks"]
        if state["consumed"] and not over:
            raise UserError(
                "the sampler's state is in the middle of an epoch of "
                f"{count_text(state['samples'], 'sample')}, of which "
                f"{state['consumed']} have been taken, and now there are {self._total}: go on with the same "
                f"samples, or leave the state out and begin another epoch by set_epoch({state['epoch'] + 1})"
            )
        return over

    @property
    def _samples(self) -> Samples:
        run = 1 if self._stream is None else self._stream.run_length
        return Samples(self._total, self._P, self._seed, self._shuffle, self._labels, run)

    @property
    def _assigned(self) -> int:
        """Number of samples of all ranks in an epoch; a sample counts for each group that sees it."""
        if self._partition is None:
            return self._total
        return self._P * self._partition.length(self._total, self._P)

    def _left(self) -> NDArray[np.int64] | list[Any]:
        """Return this rank's remaining samples of the epoch; one more than others have is not used."""
        if self._drawing is not None:
            draws = drawn(self._drawing, self._seed, self._epoch, self._total)
            return draws[self._consumed :][self._g :: self._P]
        if self._partition is None:
            return self._samples.of_epoch(self._epoch)[self._consumed :][self._g :: self._P]
        assigned = self._partition.assign(self._samples, self._g, self._epoch)
        return assigned[self._consumed // self._P :][self._j :: self._K]

    def _used(self) -> NDArray[np.int64] | list[Any]:
        """Return this epoch's remaining samples of this rank. The first call notes the sampler's settings."""
        topology, self._job = self._job, None
        if topology is not None:
            note(topology.world, self._facts())
        return self._left()[: len(self)]

    def _facts(self) -> Iterator[tuple[str, str]]:
        """Yield names and values that must be equal on all ranks; else they miss or repeat samples."""
        yield "the length of the data of a sampler", str(self._total)
        yield "the seed of a sampler", str(self._seed)
        yield "the epoch of a sampler", str(self._epoch)
        yield "shuffle of a sampler", str(self._shuffle)
        yield "drop_last of a sampler", str(self._drop_last)
        yield "the partition of a sampler", partition_text(self._partition)
        if self._labels is not None:
            yield "the digest of the labels of a sampler", digest_of(self._labels.tolist())
        if self._drawing is not None:
            draws = drawn(self._drawing, self._seed, self._epoch, self._total)
            kind = type(self._drawing).__name__
            yield f"the digest of what {kind} draws", digest_of(draws)

    def _checked(self, consumed: int) -> int:
        if not 0 <= consumed <= self._assigned:
            raise UserError(
                f"{count_text(consumed, 'sample')} consumed of an epoch of {self._assigned}: impossible"
            )
        return consumed
