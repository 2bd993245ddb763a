"""What an averager is: one method on vectors, and one value that says what others have to know of it.

What an averager may do beside that is in `hpcsgd.core.optional`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor

from hpcsgd.arguments import checked
from hpcsgd.core.flat import Bucket
from hpcsgd.core.step import StepContext
from hpcsgd.core.waits import Waits
from hpcsgd.errors import UserError

KINDS = (
    "hpcsgd.core.waits has All (all groups wait for each other), InNeighbors, Pairs, RandomPartner, Slowest "
    "and Living"
)


def _missing() -> Waits:
    raise UserError(f"Traits: waits is missing, which says who waits for whom: {KINDS}")


@checked
@dataclass(frozen=True, slots=True)
class Traits:
    """What the engine, the cost model and other averagers have to know of an averager.

    The defaults are those of an averager of which nothing is known, and `waits` has none. An averager around
    another one takes the traits of that one, and `dataclasses.replace` changes what is no longer so.

    Raises:
        UserError: without `waits`.
    """

    waits: Waits = field(default_factory=_missing)
    """Who waits for whom when groups average; the schedule says how often that is."""

    whole_model: bool = False
    """It averages all of the model; otherwise the chunk that this rank owns of each bucket."""
    reads_gradients: bool = True
    """Its `prepare` reads or changes gradients, so that all of them must have been averaged in the group."""
    leaves_mean: bool = False
    """It leaves all groups with the mean of their models, and changes nothing else."""
    vectors_only: bool = False
    """It goes by the vectors, the number of the step and its own memory alone: it may be given copies, or
    parts of the vectors, on other communicators, while training goes on."""
    elastic: bool = False
    """It averages with other jobs (`Topology.replica_groups`), and not with the groups of this job."""
    histogram_names: tuple[str, ...] = ()
    """The notes that are small whole numbers: of these it is kept how often which number came, over all
    ranks, and not what this rank noted in every step."""


@runtime_checkable
class Averager(Protocol):
    """Averages the models of the groups, or does in its place what a method has instead."""

    @property
    def traits(self) -> Traits: ...

    def average(self, vectors: Iterable[Tensor], s: StepContext) -> Iterable[Tensor]:
        """Average `vectors` in place, and return all of them in the same order. Collective.

        Both are iterables that may be lazy. Taking the next one of `vectors` waits until the optimizer has
        updated its bucket; a vector that is returned is final, so that its bucket can be gathered while
        others are averaged. An averager that changes vectors after another one has averaged them takes all
        of them first. Nothing happens before what is returned is iterated over: `run_averager` does so.
        """
        ...


def run_averager(averager: Averager, vectors: Iterable[Tensor], s: StepContext) -> list[Tensor]:
    """Average all `vectors` in place; return them once all are final. Collective."""
    return list(averager.average(vectors, s))


def vectors_of(averager: Averager, buckets: Iterable[Bucket]) -> Iterator[Tensor]:
    """Yield what `averager` averages of each of these buckets."""
    whole = averager.traits.whole_model
    return (b.w if whole else b.param_shard for b in buckets)
