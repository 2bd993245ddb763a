"""Samples in batches, and where reading has come to, to be saved and taken up again."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch.utils.data
from torch import Generator
from torch.utils.data import DataLoader

from hpcsgd.arguments import checked
from hpcsgd.data.arguments import require_same_samples, whole_number
from hpcsgd.data.batches import Batches
from hpcsgd.data.sampler import Sampler
from hpcsgd.data.split import collate
from hpcsgd.data.workers import end_by_owner_alone, require_workers, start_fork_server
from hpcsgd.errors import UserError, count_text


def reading(
    data: torch.utils.data.Dataset[Any],
    batches: torch.utils.data.Sampler[list[int]],
    workers: int = 0,
    *,
    pinned: bool = False,
) -> DataLoader[Any]:
    """What reads `batches` of `data`, in so many processes beside this one; `pinned`: for a device."""
    if workers := require_workers(workers):
        start_fork_server()
    return DataLoader(
        data,
        batch_sampler=batches,
        collate_fn=collate,
        num_workers=workers,
        pin_memory=pinned,
        persistent_workers=workers > 0,
        generator=Generator("cpu"),  # or a resumed epoch would draw once more from the model's
        multiprocessing_context="forkserver" if workers else None,  # a fork would carry MPI's threads along
        worker_init_fn=partial(end_by_owner_alone, os.getpid()) if workers else None,
    )


def require_a_batch(batches: Batches) -> None:
    """Raise `UserError` where an epoch has none."""
    if not len(batches):
        raise UserError(
            f"an epoch has {count_text(len(batches.sampler), 'sample')} for each who is dealt to, of "
            "which a step takes "
            f"{batches.per_step}"
        )


@checked
class Loader:
    """The batches of this rank, epoch after epoch, with a state from which reading goes on.

    Iterating gives what is left of an epoch, and then the next one is ahead. The state is that of the batches
    that have been given out, whatever workers have read ahead. It is the same on all ranks; loaded with other
    numbers of groups and ranks it goes on with what has not yet been seen, as the state of a `Sampler` does.
    `state_dict` and `load_state_dict` are those of torchdata's `StatefulDataLoader`, so that what saves one
    saves the other.

    Not to be confused with torch's `DataLoader`, which does not know where it is.

    Args:
        data: a dataset, such as `hpcsgd.data.Windows`.
        batch: samples of this rank in a step.
        sampler: this rank's; nobody else advances it.
        workers: processes that read ahead. Default 0: none.
        pinned: whether batches are put into pinned memory, for a device. Default False.

    Raises:
        UserError: where an epoch has no batch for this rank, the sampler deals other samples than `data` has,
            or there are more workers than the cores of a node can be of use to.

    Example:
        >>> loader = hpcsgd.Loader(data, 8, hpcsgd.Sampler(data, topology))
        >>> for x, y in loader:
        ...     break
        >>> state = loader.state_dict()
        >>> state["epoch"], state["consumed"]     # four ranks have 8 samples each behind them
        (0, 32)
        >>> loader.load_state_dict(state)
        >>> len(loader)     # of 64 samples
        1
    """

    def __init__(
        self,
        data: torch.utils.data.Dataset[Any],
        batch: int,
        sampler: Sampler,
        *,
        workers: int = 0,
        pinned: bool = False,
    ) -> None:
        require_same_samples(data, sampler.samples)
        self._sampler = sampler
        self._batches = Batches(sampler, whole_number("batch", batch, least=1))
        require_a_batch(self._batches)
        self._loader = reading(data, self._batches, workers, pinned=pinned)

    @property
    def epoch(self) -> int:
        """The one that iterating goes through, counted from 0."""
        return self._sampler.epoch

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            self._batches.advance()
            yield batch
        self._sampler.set_epoch(self.epoch + 1)

    def state_dict(self) -> dict[str, int]:
        """Seed, epoch, and how many samples of it all ranks together have been given."""
        return self._sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go to where `state`, a `state_dict()`, perhaps of other numbers of groups and ranks, was taken."""
        self._sampler.load_state_dict(state)
