"""The mean of the models of the replica groups that are alive (EnsembleSync, section 3.1, step 4).

    W ← (1/M) Σ_i W_i   over the M groups of the membership in this round

W_i is the model of group i. Float buffers are averaged, too, over all ranks of the groups: a group that
rejoins has lost its own, and needs common values. `hpcsgd.elastic.elastic_average` makes sure that either all
groups use the mean or none does, even if groups die meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from hpcsgd.comm import accumulation_dtype, phase
from hpcsgd.core.averager import Traits
from hpcsgd.core.norm import squared_norm, sum_on_host
from hpcsgd.core.step import StepContext
from hpcsgd.core.traffic import FLOAT64, CommOp, ModelLayout, allreduce
from hpcsgd.core.waits import Living, Quorum
from hpcsgd.parts.averagers.flattened import average_flattened, require_same_layout


@dataclass(frozen=True)
class ElasticMean:
    """The averager over the living replica groups, `topology.replica_groups`.

    The metric `distance` is ‖W_i − W̄‖₂ of this replica group, where W̄ is the mean. The `quorum` is not for
    the average itself: `hpcsgd launch` passes it to the coordinator.
    """

    quorum: Quorum | None = None
    traits: Traits = field(init=False, repr=False)

    def __post_init__(self) -> None:  # made once, because every step reads them
        traits = Traits(Living(quorum=self.quorum), whole_model=True, elastic=True)
        object.__setattr__(self, "traits", traits)

    def average(self, vectors: Iterable[Tensor], s: StepContext) -> list[Tensor]:
        found = list(vectors)
        before = [b.parameters.clone() for b in s.buckets]
        average_with_buffers(s, lambda w: s.topology.replica_groups.mean(w, s.t, alike=not s.sharded))
        s.metrics["distance"] = distance_of_group(s, before)
        return found

    def comm_ops(self, m: ModelLayout) -> Iterator[CommOp]:
        """Yield the operations of a synchronization.

        Each of the K ranks of a group averages 1/K of the model in a ring with ranks of other groups.
        """
        yield allreduce("intra_group", 16, "buffers")
        yield from (allreduce("intra_group", nbytes) for nbytes in m.buffers)
        model = sum(b.used * b.width for b in m.buckets) + sum(m.buffers)
        yield allreduce("replica_groups", model / m.K)
        yield from norm_ops(m)  # of the distance


def average_with_buffers(s: StepContext, average: Callable[[list[Tensor]], None]) -> None:
    """Call `average` with the model and the float buffers, which it changes in place; collective.

    The buffers are the means over the ranks of this group, joined to one vector per dtype.
    """
    model, buffers = [b.parameters for b in s.buckets], s.buffers
    with phase("buffers"):
        require_same_layout({"float buffers": buffers}, s.topology.intra_group, "models", "rank")
    average_flattened(buffers, s.topology.intra_group, lambda joined: average([*model, *joined]))


def rebased(w: Sequence[Tensor], base: Sequence[Tensor], newest: Sequence[Tensor]) -> list[Tensor]:
    """Return the model that differs from `newest` as the model `w` differs from `base`.

    `base` and `newest` are rounded to the dtype of `w`, so that rounding errors do not count as movement. The
    result has the dtype of sums.
    """
    return [
        x.to(accumulation_dtype(x.dtype)).sub(b).add_(n.to(x.device, x.dtype))
        for x, b, n in zip(w, base, newest, strict=True)
    ]


def norm_ops(m: ModelLayout, norms: int = 1) -> Iterator[CommOp]:
    """Yield the operation by which the ranks of a sharded group learn `norms` norms, each over all ranks."""
    if m.sharded:
        yield allreduce("intra_group", FLOAT64 * norms)


def distance_of_group(s: StepContext, models: Iterable[Tensor]) -> float:
    """Return ‖x − w‖₂ of this group's model w and another one x, whose parts `models` change; collective."""
    changes = (x.sub_(b.parameters) for b, x in zip(s.buckets, models, strict=True))
    squared = sum_on_host(squared_norm(x) for x in changes)
    if s.sharded:
        s.topology.intra_group.allreduce(squared).wait()
    return squared.sqrt().item()
