"""As many batches on every rank, of loaders that have unlike numbers of them."""

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
    """Iterate `loader` for as long as every rank has a batch; collective.

    All ranks have to make the same number of steps. A loader whose length is not the same on all ranks, or
    that has no length, ends for all of them where it ends for the first one: what others have left is not
    used. Lengths are compared once; where a loader has none, ranks ask each other before each batch.

    Not to be confused with torch's `Join`, where ranks that have no batch left answer the others, so that
    these go on. `hpcsgd.Sampler` deals the same number to all ranks in the first place.

    Args:
        loader: this rank's, of any length; with a length on all ranks or on none.
        topology: from `init`.

    Returns:
        An iterator over the batches.

    Raises:
        JobError: where an exception has ended the loader of a rank, or some have a length and others not.

    Example:
        >>> unlike = [0.5] * (3 + topology.rank)
        >>> len(list(hpcsgd.equal_batches(unlike, topology)))
        3
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
        yield from islice(loader, min(lengths))
        return
    batches, read = iter(loader), list[Batch]()

    def ended() -> bool:
        read[:] = islice(batches, 1)
        return not read

    while not any(gather_or_raise(topology.world, "reading a batch", ended)):
        yield read[0]


def _length(loader: Iterable[Any]) -> int | None:
    """Torch's `DataLoader` has one or not, as its dataset."""
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except TypeError:
        return None
