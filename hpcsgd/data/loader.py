"""Loaders that read samples in batches, with a position that can be saved and restored."""

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
from hpcsgd.data.loader_processes import end_by_owner_alone, require_num_workers, start_fork_server
from hpcsgd.data.sampler import Sampler
from hpcsgd.data.split import Split, Wrapper, collate
from hpcsgd.errors import UserError, count_text


def reading(
    data: torch.utils.data.Dataset[Any],
    batches: torch.utils.data.Sampler[list[int]],
    num_workers: int = 0,
    *,
    pinned: bool = False,
) -> DataLoader[Any]:
    """Return a `DataLoader` that reads `batches` of `data`, with `num_workers` loader processes.

    With `pinned` the loader puts batches into pinned memory, for copies to a device.
    """
    if num_workers := require_num_workers(num_workers):
        start_fork_server()
    return DataLoader(
        data if isinstance(data, Split) else Wrapper(data),
        batch_sampler=batches,
        collate_fn=collate,
        num_workers=num_workers,
        pin_memory=pinned,
        persistent_workers=num_workers > 0,
        generator=Generator("cpu"),  # otherwise a resumed run would draw once more from torch's generator
        multiprocessing_context="forkserver" if num_workers else None,  # a fork would copy MPI's threads
        worker_init_fn=partial(end_by_owner_alone, os.getpid()) if num_workers else None,
    )


def read_batches(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yield the batches of `loader`. Raises `UserError` if one of its processes has been killed."""
    try:
        yield from loader
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker"):
            raise
        raise UserError(
            f"a loader process was killed ({str(error).strip(' .')}), usually because the node's memory is "
            "full: give fewer num_workers, or ask for more memory"
        ) from error


def require_a_batch(batches: Batches) -> None:
    """Raise `UserError` if an epoch of `batches` has no batch, because there are too few samples."""
    if not len(batches):
        raise UserError(
            f"an epoch has {count_text(len(batches.sampler), 'sample')} per rank or group, of "
            "which a step takes "
            f"{batches.per_step}"
        )


@checked
class Loader:
    """The batches of this rank, epoch after epoch, with a state from which reading continues.

    Iterating yields what is left of an epoch, then moves to the next epoch. The state counts the batches
    that have been yielded, however far loader processes have read ahead. The state is the same on all ranks.
    A loader on other numbers of groups and ranks that loads it continues with the samples that no rank has
    seen yet, as a `Sampler` does. `state_dict` and `load_state_dict` have the interface of torchdata's
    `StatefulDataLoader`.

    Args:
        data: A dataset, such as `hpcsgd.data.Windows`.
        batch: Samples of this rank in a step, at least 1.
        sampler: The sampler of this rank. Nothing else may advance it.
        num_workers: Processes that read ahead. Default 0: none.
        pinned: If true, batches are put into pinned memory, for a device. Default False.

    Raises:
        UserError: If an epoch has no batch for this rank, the sampler has another number of samples than
            `data`, or there are more workers than the cores of a node can serve.

    Example:
        >>> loader = hpcsgd.Loader(data, 8, hpcsgd.Sampler(data, topology))
        >>> for x, y in loader:
        ...     break
        >>> state = loader.state_dict()
        >>> state["epoch"], state["consumed"]     # four ranks have consumed 8 samples each
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
        num_workers: int = 0,
        pinned: bool = False,
    ) -> None:
        require_same_samples(data, sampler.samples)
        self._sampler = sampler
        self._batches = Batches(sampler, whole_number("batch", batch, least=1))
        require_a_batch(self._batches)
        self._loader = reading(data, self._batches, num_workers, pinned=pinned)

    @property
    def epoch(self) -> int:
        """The epoch that iterating goes through, counted from 0."""
        return self._sampler.epoch

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        for batch in read_batches(self._loader):
            self._batches.advance()
            yield batch
        self._sampler.set_epoch(self.epoch + 1)

    def state_dict(self) -> dict[str, int]:
        """Return the sampler's state: seed, epoch, and how many of its samples all ranks have consumed."""
        return self._sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue at the position of `state`, which may be of other numbers of groups and ranks."""
        self._sampler.load_state_dict(state)
