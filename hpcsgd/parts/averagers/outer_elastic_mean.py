"""An outer optimizer on the mean of the replica groups that are alive: DiLoCo among groups that may die.

    W ← the mean of the models of the groups in the membership
    θ ← OuterOpt(θ, θ − W), if one of their models has moved
    W_i ← θ                       for every group i

Every group keeps θ and the state of OuterOpt, and takes the same step. So no group and no server is needed
for the others to go on. A group that returns has neither: it gets those of another group in its first round,
together with the mean, and then takes the same step.

A round without training between it and the last one, such as the one in which a group returns, is no step:
the outer momentum would move the model.

The mean is weighted by the groups' tokens if `tokens_per_step` is given, as in `token_weights`.

A late group i, which the others left out for `quorum.late_rounds` rounds at most, counts when it returns:

    W_i ← θ − (θ_i − W_i)         θ is that of the others, θ_i the one from which group i trained

So θ − W has its displacement, once, and nothing of what the others did meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from hpcsgd.core.averager import Traits
from hpcsgd.core.replica_groups import Facts
from hpcsgd.core.state import State
from hpcsgd.core.step import StepContext
from hpcsgd.core.traffic import FLOAT64, CommOp, ModelLayout, allreduce
from hpcsgd.core.waits import Quorum
from hpcsgd.parts.averagers.elastic_mean import (
    ElasticMean,
    average_with_buffers,
    distance_of_group,
    norm_ops,
    rebased,
)
from hpcsgd.parts.averagers.fragment_contribution import MeanPart, mean_parts
from hpcsgd.parts.averagers.outer_step import MakeOptimizer, OuterStep
from hpcsgd.parts.averagers.token_weights import TokenWeights, factor_of, scaled
from hpcsgd.parts.outer_schedules.base import OuterSchedule


class AveragesFrom(Protocol):
    """An average over the living replica groups to which an outer optimizer can be added."""

    @property
    def traits(self) -> Traits: ...

    def average_from(
        self,
        theta: Sequence[Tensor],
        s: StepContext,
        shared: Sequence[Tensor] = (),
        weights: Sequence[float] = (),
    ) -> tuple[int, int]:
        """Average the groups' models, which were `theta` after the last synchronization. Collective.

        Returns the number of groups in the mean (0 if none has moved), and the step of the groups that have
        missed no round. `shared` is the same in all groups in the mean; in the first round of other members,
        all get that of the first group that has missed no round. It begins with θ of these groups, which may
        be in wider numbers than `theta`. `weights` has the weight of this group in the mean, or is empty if
        all groups weigh alike.
        """
        ...

    def norm_ops(self, m: ModelLayout, parts: int) -> Iterable[CommOp]:
        """Return the operations by which a sharded group learns the norms of its change in each part."""
        ...

    def part_ops(self, m: ModelLayout) -> Iterable[CommOp]:
        """Return the operations that then average the model or part `m`, without that of `facts_op`."""
        ...


@dataclass(frozen=True)
class MeanFrom:
    """The mean of `ElasticMean(quorum)`, for an outer optimizer."""

    quorum: Quorum | None = None

    @property
    def traits(self) -> Traits:
        return ElasticMean(self.quorum).traits

    def average_from(
        self,
        theta: Sequence[Tensor],
        s: StepContext,
        shared: Sequence[Tensor] = (),
        weights: Sequence[float] = (),
    ) -> tuple[int, int]:
        before = [b.parameters.clone() for b in s.buckets]
        norm = distance_of_group(s, [x.clone() for x in theta])
        index = s.topology.replica_groups.index
        plain = PlainContribution(index, norm, shared, self.quorum, weights, theta)

        def average(w: list[Tensor]) -> None:
            plain.tensors = w
            s.topology.replica_groups.mean(w, s.t, alike=not s.sharded, contribution=plain)

        average_with_buffers(s, average)
        s.metrics["distance"] = distance_of_group(s, before)
        return plain.moved, plain.t

    def fragment_parts(
        self,
        cuts: Sequence[Sequence[Sequence[slice]]],
        models: Sequence[Sequence[Tensor]],
        theta: Sequence[Sequence[Tensor]],
        s: StepContext,
    ) -> Sequence[MeanPart]:
        """Return the fragments `models` of this group, which were `theta` after their last synchronizations.

        `cuts` says for each fragment and bucket where it is. Collective in a sharded group.
        """
        return mean_parts(models, theta, s)

    def norm_ops(self, m: ModelLayout, parts: int) -> Iterator[CommOp]:
        yield from norm_ops(m, parts)

    def part_ops(self, m: ModelLayout) -> Iterator[CommOp]:
        yield from ElasticMean().comm_ops(m)


class PlainContribution:
    """What group `index` adds to a mean: its tensors, its weight, and the norm of its change from θ.

    `theta` are the tensors of θ if the group's first tensors are a model. Otherwise it is empty: they are
    changes, and count as they are when the group is late.
    """

    part: int | None = None

    def __init__(
        self,
        index: int,
        norm: float,
        shared: Sequence[Tensor],
        quorum: Quorum | None,
        weights: Sequence[float],
        theta: Sequence[Tensor] = (),
    ) -> None:
        self.norms: Sequence[float] = [norm]
        self._index, self.weights, self.shared, self._theta = index, weights, shared, theta
        self.late_rounds = quorum.late_rounds if quorum is not None else 0
        self.tensors: Sequence[Tensor] = ()
        self.moved, self.t = 0, 0
        """The number of groups in the mean, or 0 if none of them has moved; and the updates that they have
        done."""

    def __call__(self, facts: Facts, newest: Sequence[Tensor] = ()) -> Sequence[Tensor]:
        norms, self.t = facts.norms, facts.t
        self.moved = len(norms) if any(norm for (norm,) in norms.values()) else 0
        tensors, M = self.tensors, len(self._theta)
        if newest:
            tensors = [*rebased(tensors[:M], self._theta, newest[:M]), *tensors[M:]]
        return scaled(tensors, factor_of(facts.weights, self._index, 0))


def facts_op(m: ModelLayout, numbers: int) -> CommOp:
    """Return the operation by which groups learn of each other before they average.

    A group has so many `numbers`: the norm of each part of the model, and its weights, if it has any.
    """
    return allreduce("replica_groups", FLOAT64 * m.P * (numbers + 2))


class OuterElasticMean:
    """The averager `inner`, followed by a step on θ, the model after the last synchronization.

    The step is that of `OuterStep(make_optimizer, schedule)`. In the mean, groups have the weights of
    `TokenWeights(tokens_per_step)`.
    """

    def __init__(
        self,
        inner: AveragesFrom,
        make_optimizer: MakeOptimizer,
        schedule: OuterSchedule | None = None,
        tokens_per_step: float | None = None,
    ) -> None:
        self.inner, self.outer = inner, OuterStep(make_optimizer, schedule)
        self.tokens_per_step, self._weights = tokens_per_step, TokenWeights(tokens_per_step)
        self.traits = replace(inner.traits, own_settings=("tokens_per_step",))
        self.outer.require_shareable()
        # By these, ranks are compared.
        self.make_optimizer, self.schedule = self.outer.make_optimizer, schedule

    def prepare(self, vectors: Sequence[Tensor], s: StepContext) -> None:
        self._start(s)
        if s.in_step:
            self._weights.count_step()

    def average(self, vectors: Iterable[Tensor], s: StepContext) -> list[Tensor]:
        found, outer = list(vectors), self.outer
        w = [b.parameters for b in s.buckets]
        shared = outer.shared()
        theta = [x.to(y.dtype) for x, y in zip(outer.theta, w, strict=True)]
        moved, t = self.inner.average_from(theta, s, shared, self._weights.own)
        self._weights.received(0)
        outer.adopt(shared)
        if moved:
            s.metrics |= outer.set_values(t, moved)
            outer.step(w)
        for mine, x in zip(w, outer.theta, strict=True):
            mine.copy_(x)
        return found

    def memory_bytes(self, m: ModelLayout) -> float:
        return self.outer.tensors * m.own_elements(wide=True) * (1 if m.sharded else m.K)

    def comm_ops(self, m: ModelLayout) -> Iterator[CommOp]:
        yield from self.inner.norm_ops(m, 1)
        yield facts_op(m, 1 + len(self._weights.own))
        yield from self.inner.part_ops(m)

    def state_dict(self) -> State:
        state = self.outer.state_dict()
        return replace(state, replicated=state.replicated | self._weights.state())

    def load_state_dict(self, state: State) -> None:
        """Store `state`; `prepare` loads it into θ and the outer optimizer at the next step."""
        self._weights.load(state.replicated)
        self.outer.load_state_dict(state)

    def _start(self, s: StepContext) -> None:
        if not self.outer.started:
            self.outer.start([b.parameters for b in s.buckets])
