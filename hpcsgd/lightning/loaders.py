"""Checks and changes of the data loaders that Lightning uses for training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any, final

from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import DataLoader, IterableDataset

from hpcsgd.core.topology import Topology
from hpcsgd.data.equal import equal_batches
from hpcsgd.data.sampler import Sampler
from hpcsgd.errors import UserError


@final
class EqualBatches:
    """A training loader that ends on all ranks when the first rank runs out of batches.

    Attributes are those of the loader, which Lightning reads and sets.
    """

    def __init__(self, loader: Iterable[Any], topology: Topology) -> None:
        vars(self).update(_loader=loader, _topology=topology)

    def __iter__(self) -> Iterator[Any]:
        return equal_batches(self._loader, self._topology)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._loader, name, value)


def for_training(loader: Any, topology: Topology) -> Any:
    """Return `loader`, or `EqualBatches` of it if its number of batches may differ between ranks."""
    is_stream = isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)
    return EqualBatches(loader, topology) if is_stream or not isinstance(loader, Sized) else loader


def require_whole_sampler(loader: Any) -> None:
    """Raise `UserError` if Lightning has put a sampler of its own around an `hpcsgd.Sampler`.

    Each rank would then see 1/N of its own samples.
    """
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, DistributedSamplerWrapper) and _holds_hpcsgd_sampler(sampler):
        raise UserError(
            "hpcsgd.Sampler has divided the samples among the ranks, and Lightning would divide them again: "
            "give Trainer(use_distributed_sampler=False)"
        )


def _holds_hpcsgd_sampler(sampler: Any) -> bool:
    """Return whether Lightning's wrapper `sampler` has an `hpcsgd.Sampler` inside."""
    inside = getattr(sampler.dataset, "_sampler", None)
    return isinstance(inside, Sampler)
