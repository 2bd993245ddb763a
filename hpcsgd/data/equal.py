"""Equally many batches on every rank, from loaders of different lengths."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from itertools import islice
from typing import Any, TypeVar

from hpcsgd.arguments import checked
from hpcsgd.core.topology import Topology, gather_or_raise
from hpcsgd.errors import UserError

Batch = TypeVar("Batch")


@checked
def equal_batches(loader: Iterable[Batch], topology: Topology) -> Iterator[Batch]:
    """Iterate over `loader` for as long as every rank has a batch; collective.

    All ranks have to make the same number of steps. If lengths differ between ranks, or a loader has no
    length, all ranks stop when the first one runs out. The other ranks' remaining batches are not used.
    Lengths are compared once. Where loaders have no length, the ranks communicate before each batch.

    Args:
        loader: The loader of this rank. Either all ranks' loaders have a length, or none has.
        topology: The ranks and groups, from `init`.

    Returns:
        An iterator over the batches.

    Raises:
        JobError: If an exception has ended the loader of a rank, or only some loaders have a length.
        UserError: If this rank's loader ends before its length.

    Example:
        >>> unlike = [0.5] * (3 + topology.rank)
        >>> len(list(hpcsgd.equal_batches(unlike, topology)))
        3

    See Also:
        `Sampler`: assigns the same number of samples to all ranks.
    """
    length = _length(loader)
    lengths = topology.world.gather_objects(length)
    with topology.raise_on_all_ranks("counting batches"):
        if len({each is None for each in lengths}) > 1:
            raise UserError(
                f"the loader of rank {lengths.index(None)} has no length, and others have one: give "
                "all ranks loaders of one kind"
            )
    if length is not None:
        ended_after = 0
        for batch in islice(loader, least := min(lengths)):
            ended_after += 1
            yield batch
        if ended_after < least:  # other ranks would wait for this one in their next step
            raise UserError(
                f"the loader of rank {topology.rank} has the length {length}, and ended after batch "
                f"{ended_after}: its length has to be that of what it yields, or give all ranks loaders "
                "without one"
            )
        return
    batches, read = iter(loader), list[Batch]()

    def ended() -> bool:
        read[:] = islice(batches, 1)
        return not read

    while not any(gather_or_raise(topology.world, "reading a batch", ended)):
        yield read[0]


def _length(loader: Iterable[Any]) -> int | None:
    """Return the loader's length, or None if it has none, like a `DataLoader` of a dataset without length."""
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except TypeError:
        return None
