"""Radial-directional averaging of the replica groups that are alive, as the mean of an outer optimizer.

The algorithm is that of `hpcsgd.parts.averagers.radial_directional`, among the M groups of the membership in
this round:

    v_m = W_m − θ
    W ← θ + v                 for every group, where v is the average of v_1 … v_M

With `tokens_per_step`, all means are weighted by the groups' tokens, as in the paper (`token_weights`).

In one round the groups average the directions φ(v_m), the norms ‖v_m‖ and float buffers, so that either all
groups have all of these or none has. Every group has θ, because the outer optimizer gives it to groups that
return. A late group adds its own change, from the θ from which it trained, when it returns.

Differences from `RadialDirectionalMean`:

- A tensor whose directions cancel does not move, because the plain mean would need another round.
- Every group computes ‖d‖ itself. On hosts of different kinds it may differ in the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from hpcsgd.comm import Communicator, phase
from hpcsgd.core.averager import Traits
from hpcsgd.core.step import StepContext
from hpcsgd.core.traffic import FLOAT64, CommOp, ModelLayout, allreduce
from hpcsgd.core.waits import Quorum
from hpcsgd.parts.averagers.by_tensor import ByTensor
from hpcsgd.parts.averagers.elastic_mean import ElasticMean, average_with_buffers, distance_of_group
from hpcsgd.parts.averagers.fragment_contribution import RadialPart, radial_parts
from hpcsgd.parts.averagers.outer_elastic_mean import PlainContribution
from hpcsgd.parts.averagers.radial_directional import (
    PHASE,
    RadialDirectional,
    changes_of,
    from_directions,
    in_wide,
    plain_tensors,
    to_directions,
)


@dataclass(frozen=True)
class RadialDirectionalElasticMean:
    """The radial-directional average `merge` over the living replica groups, for an outer optimizer."""

    merge: RadialDirectional
    quorum: Quorum | None = None

    @property
    def traits(self) -> Traits:
        return ElasticMean(self.quorum).traits

    def prepare(self, vectors: Sequence[Tensor], s: StepContext) -> None:
        if s.t == 1:
            plain_tensors(self.merge, ByTensor.of_buckets(s.buckets), s)  # raises an error for a wrong name

    def average_from(
        self,
        theta: Sequence[Tensor],
        s: StepContext,
        shared: Sequence[Tensor] = (),
        weights: Sequence[float] = (),
    ) -> tuple[int, int]:
        """Average the groups' models, which were `theta` after their last synchronization. Collective.

        Returns the number of groups in the mean (0 if no model has changed), and the step of the groups that
        have missed no round. `AveragesFrom` describes `shared` and `weights`.
        """
        models = [b.parameters for b in s.buckets]
        before = [w.clone() for w in models]
        tensors, group = ByTensor.of_buckets(s.buckets), _ranks_with_parts(s)
        plain = plain_tensors(self.merge, tensors, s)
        changes = changes_of(models, theta)
        with phase(PHASE):
            radii = tensors.norms(changes, group)
        norm = radii.square().sum().sqrt().item()
        index = s.topology.replica_groups.index
        contribution = PlainContribution(index, norm, shared, self.quorum, weights)
        radii = radii.to(changes[0].device)
        tensors.scale(changes, to_directions(radii, plain))

        def average(w: list[Tensor]) -> None:
            contribution.tensors = [*changes, *w[len(models) :], radii]
            s.topology.replica_groups.mean(
                contribution.tensors, s.t, alike=not s.sharded, contribution=contribution
            )

        average_with_buffers(s, average)
        with phase(PHASE):
            lengths = tensors.norms(changes, group)
        factors, _ = from_directions(radii, lengths, plain, tensors.slots)
        tensors.scale(changes, factors)
        for w, start, change in zip(models, shared or theta, changes, strict=False):
            w.copy_(change.add_(start.to(w.dtype)))
        s.metrics["distance"] = distance_of_group(s, before)
        return contribution.moved, contribution.t

    def fragment_parts(
        self,
        cuts: Sequence[Sequence[Sequence[slice]]],
        models: Sequence[Sequence[Tensor]],
        theta: Sequence[Sequence[Tensor]],
        s: StepContext,
    ) -> Sequence[RadialPart]:
        """Return what this group adds to the averages of the fragments `models` of its model.

        `theta` are the same fragments after their last synchronizations. `cuts` says for each fragment and
        bucket where it is. Collective in a sharded group.
        """
        return radial_parts(self.merge, cuts, models, theta, s)

    def norm_ops(self, m: ModelLayout, parts: int) -> Iterator[CommOp]:
        if m.sharded:
            yield allreduce("intra_group", FLOAT64 * len(m.layers) * parts, PHASE)

    def part_ops(self, m: ModelLayout) -> Iterator[CommOp]:
        norms = FLOAT64 * len(m.layers)
        if m.sharded:
            yield allreduce("intra_group", norms, PHASE)
        yield from ElasticMean().comm_ops(in_wide(m))
        yield allreduce("replica_groups", norms if m.sharded else norms / m.K)


def _ranks_with_parts(s: StepContext) -> Communicator | None:
    """Return the ranks of the group if each has only a part of the model; None if each has all of it."""
    return s.topology.intra_group if s.sharded else None
