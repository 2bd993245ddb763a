"""The protocol of an averager, and its traits: what other code has to know of it.

The optional protocols of an averager are in `hpcsgd.core.optional`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

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

    The defaults are the safe ones for an unknown averager; `waits` has no default. An averager around
    another one copies the traits of the inner one, and changes what differs by `dataclasses.replace`.

    Raises:
        UserError: If `waits` is missing.
    """

    waits: Waits = field(default_factory=_missing)
    """Which groups wait for which others at a synchronization. The schedule says how often that is."""

    whole_model: bool = False
    """True: the averager averages the whole model. False: only the shard of each bucket that this rank
    owns."""
    reads_gradients: bool = True
    """True: the averager's `prepare` reads or changes gradients. So the engine averages all gradients in the
    group before it calls `prepare`."""
    leaves_mean: bool = False
    """True: the averager leaves all groups with the mean of their models and changes nothing else."""
    mean_of: Literal["", "models", "models and state"] = ""
    """What is the mean over the groups after a synchronization, whatever else the averager does. "models":
    every group keeps its own optimizer state, or averages it at other times. "models and state": the averager
    averages or renews all optimizer state, too. "": anything else."""
    vectors_only: bool = False
    """True: the averager uses only the vectors to average, the step number and its own state. Other code may
    then let it average copies or parts of the vectors, on other communicators, while training goes on."""
    elastic: bool = False
    """True: the averager averages with other jobs (`Topology.replica_groups`), not with the groups of this
    job."""
    local_models: bool = False
    """True: the averager holds the model, but each group also trains a model of its own between two
    synchronizations. A checkpoint then keeps the groups' models, too."""
    own_settings: tuple[str, ...] = ()
    """Names of constructor arguments that each replica group chooses for itself; all others must be the same
    in all groups."""
    histogram_names: tuple[str, ...] = ()
    """Metrics that are small whole numbers. For these a histogram over all ranks is kept, instead of each
    rank's value in every step."""


@runtime_checkable
class Averager(Protocol):
    """The part of a method that changes the groups' models at a synchronization, such as to their mean."""

    @property
    def traits(self) -> Traits: ...

    def average(self, vectors: Iterable[Tensor], s: StepContext) -> Iterable[Tensor]:
        """Average `vectors` in place, and return all of them in the same order. Collective.

        Both iterables may be lazy. Taking the next vector from `vectors` waits until the optimizer has
        updated the bucket of that vector. A returned vector is final, so its bucket can be gathered while
        other vectors are averaged. An averager that changes vectors after an inner averager has averaged them
        first waits for all vectors. Nothing happens until the caller iterates over the result, as
        `run_averager` does.
        """
        ...


def run_averager(averager: Averager, vectors: Iterable[Tensor], s: StepContext) -> list[Tensor]:
    """Average all `vectors` in place, and return them once all are final. Collective."""
    return list(averager.average(vectors, s))


def vectors_of(averager: Averager, buckets: Iterable[Bucket]) -> Iterator[Tensor]:
    """Yield the vector of each bucket that `averager` averages: `w` or `param_shard`."""
    whole = averager.traits.whole_model
    return (b.w if whole else b.param_shard for b in buckets)
