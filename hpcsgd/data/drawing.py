"""The samples that a user's sampler draws in an epoch, and datasets that are read in runs of neighbours."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import torch.utils.data
from numpy.typing import NDArray
from torch.utils.data.distributed import DistributedSampler

from hpcsgd.core.generators import generators_state, load_generators_state, seed_on_host
from hpcsgd.errors import UserError, count_text

Drawing = torch.utils.data.Sampler[Any]
_seeding = threading.Lock()
"""A lock, because all threads share the random generators of the process."""


def require_whole(sampler: Drawing, ours: type[Drawing]) -> None:
    """Raise `UserError` if `sampler` divides samples among ranks itself.

    These are torch's `DistributedSampler` and the class `ours`, which is `hpcsgd.Sampler`.
    """
    if isinstance(sampler, DistributedSampler | ours):
        raise UserError(
            f"data is a {type(sampler).__name__}, which divides samples among ranks: give hpcsgd.Sampler "
            "the dataset, or the sampler that you would use in one process"
        )


def drawn(sampler: Drawing, seed: int, epoch: int, total: int) -> list[Any]:
    """Return all draws of `sampler` in an epoch; their random numbers depend on `seed` and `epoch` alone.

    Raises:
        UserError: If the number of draws differs from the sampler's length, or from `total`, which it is in
            other epochs.
    """
    with _seeding, _seeded(sampler, (seed * 1_000_003 + epoch) % 2**63):
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)  # pyright: ignore[reportAttributeAccessIssue]
        most = len(sampler)  # pyright: ignore[reportArgumentType]
        found = list(islice(sampler, most + 1))  # the sampler may be endless
    expected = len(sampler)  # pyright: ignore[reportArgumentType]
    if len(found) != expected:
        drew = f"more than {most}" if len(found) > most else str(len(found))
        raise UserError(
            f"{type(sampler).__name__} has drawn {drew} samples in epoch {epoch}, and says that it has "
            f"{expected}: its length has to be that of the epoch"
        )
    if expected != total:
        raise UserError(
            f"{type(sampler).__name__} has drawn {count_text(expected, 'sample')} in epoch {epoch}, and had "
            f"{total} when hpcsgd.Sampler was made: every epoch needs as many: give a sampler that fills up "
            "or cuts its epochs"
        )
    return found


@contextmanager
def _seeded(sampler: Any, seed: int) -> Iterator[None]:
    """Seed all generators on the host that the sampler may use, and restore their states afterwards."""
    of_process, own = generators_state(), list(_generators(sampler))
    before = [generator.get_state() for generator in own]
    seed_on_host(seed)
    for generator in own:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        load_generators_state(of_process)
        for generator, state in zip(own, before, strict=True):
            generator.set_state(state)


def _generators(sampler: Any) -> Iterator[torch.Generator]:
    """Yield the generators of the sampler and of samplers inside it, as in torch's `BatchSampler`."""
    while sampler is not None:
        if isinstance(generator := getattr(sampler, "generator", None), torch.Generator):
            yield generator
        sampler = getattr(sampler, "sampler", None)


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
