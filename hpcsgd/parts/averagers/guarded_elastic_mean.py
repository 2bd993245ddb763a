"""The guarded mean of the replica groups that are alive: each group tests itself by its own history.

The algorithm and its symbols are those of `hpcsgd.parts.averagers.guarded`, among the groups of this round:

    group g is left out      if G_g is not finite, or G_g − m_g > z·σ_g     (decided by group g)
    a_g = exp(−G_g/τ) / Σ_j exp(−G_j/τ)   over the other groups, τ = T·median_j G_j
    W ← Σ_g a_g·W_g          for every group; θ if all groups are left out

As all groups begin from the same θ, Σ_g a_g·W_g is θ + Σ_g a_g·Δ_g.

Differences from `guarded`:

- A group keeps only its own history. So groups may leave and return. A group that returns has a new history.
- There is no limit φ of the mean change, because a group that returns does not know θ.
- Float buffers are averaged with the same weights.
- Groups may also have weights w_g by their tokens (`token_weights`). Then a_g is proportional to
  w_g·exp(−G_g/τ).
- If a round has only one group, that group is not left out.
- For a late group, G_g is the norm of its change from the θ that it started from, not from the newest θ.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from hpcsgd.core.replica_groups import Facts
from hpcsgd.core.state import State
from hpcsgd.core.step import StepContext
from hpcsgd.core.traffic import FLOAT64, CommOp, ModelLayout, allreduce
from hpcsgd.core.waits import Quorum
from hpcsgd.errors import UserError
from hpcsgd.parts.averagers.elastic_mean import (
    ElasticMean,
    average_with_buffers,
    distance_of_group,
    norm_ops,
    rebased,
)
from hpcsgd.parts.averagers.pseudo_gradient_penalty import NormHistory, PseudoGradientPenalty
from hpcsgd.parts.averagers.token_weights import scaled

log = logging.getLogger(__name__)


class GuardedElasticMean:
    """The averager `ElasticMean(quorum)`, which `guard` protects from outliers."""

    def __init__(self, guard: PseudoGradientPenalty, quorum: Quorum | None = None) -> None:
        if guard.max_norm is not None:
            raise UserError(
                f"guard: max_norm = {guard.max_norm:g}: expected None, because a group that returns does not "
                "know by how much the others have moved",
                key="guard",
            )
        self.guard, self.quorum = guard, quorum
        self.traits = ElasticMean(quorum).traits
        self._theta: list[Tensor] = []
        self._buffers: list[Tensor] = []
        """The float buffers after the last synchronization, one vector per dtype."""
        self._history = NormHistory()
        self._is_out = False
        """True if this group is left out according to the log."""

    def prepare(self, vectors: Sequence[Tensor], s: StepContext) -> None:
        if not self._theta:
            self._theta = [b.parameters.clone() for b in s.buckets]

    def average(self, vectors: Iterable[Tensor], s: StepContext) -> list[Tensor]:
        found = list(vectors)
        self.average_from(self._theta, s)
        for theta, b in zip(self._theta, s.buckets, strict=True):
            theta.copy_(b.parameters)
        return found

    def average_from(
        self,
        theta: Sequence[Tensor],
        s: StepContext,
        shared: Sequence[Tensor] = (),
        weights: Sequence[float] = (),
    ) -> tuple[int, int]:
        """Average the models, `theta` after the last synchronization, with the weights of the guard.

        For arguments and result see `AveragesFrom.average_from`.
        """
        before = [b.parameters.clone() for b in s.buckets]
        norm = distance_of_group(s, [x.clone() for x in theta])
        outlier = self._history.is_outlier(norm, self.guard)
        late = self.quorum is not None and self.quorum.late_rounds > 0
        began = [x.clone() for x in theta] if late else theta  # a late group gets the others' θ in `theta`
        index = s.topology.replica_groups.index
        tested = math.inf if outlier else norm
        weighted = _Weighted(self.guard, self.quorum, index, tested, shared, weights)

        def average(w: list[Tensor]) -> None:
            buffers = w[len(before) :]
            known = [x.shape for x in buffers] == [x.shape for x in self._buffers]
            weighted.tensors, weighted.theta = w, theta
            weighted.last_buffers = self._buffers if known else buffers
            s.topology.replica_groups.mean(w, s.t, alike=not s.sharded, contribution=weighted)
            self._buffers = [x.clone() for x in buffers]

        average_with_buffers(s, average)
        out = weighted.counts and index not in weighted.shares
        s.metrics["groups_left_out"] = float(weighted.left_out)
        s.metrics["min_weight"] = min(weighted.shares.values(), default=0.0)
        s.metrics["distance"] = distance_of_group(s, [x.clone() for x in began] if out else before)
        self._report(norm, out=out, all_out=not weighted.shares, s=s)
        if weighted.counts and math.isfinite(norm) and not (out and weighted.shares):
            self._history = self._history.including(norm, self.guard)
        return len(weighted.shares) if weighted.moved else 0, weighted.t

    def memory_bytes(self, m: ModelLayout) -> float:
        return sum(b.used * b.width for b in m.buckets) / (m.K if m.sharded else 1)

    def comm_ops(self, m: ModelLayout) -> Iterator[CommOp]:
        yield from self.norm_ops(m, 1)
        yield allreduce("replica_groups", FLOAT64 * m.P * 3)
        yield from self.part_ops(m)

    def norm_ops(self, m: ModelLayout, parts: int) -> Iterator[CommOp]:
        """Yield the operation by which a sharded group learns the norm of its change."""
        yield from norm_ops(m, parts)

    def part_ops(self, m: ModelLayout) -> Iterator[CommOp]:
        """Yield the operations of the average, without the message by which groups learn of each other."""
        yield from ElasticMean().comm_ops(m)

    def state_dict(self) -> State:
        past = self._history
        return State(replicated={"mean": past.mean, "variance": past.variance, "count": past.count})

    def load_state_dict(self, state: State) -> None:
        """Load the history; θ is the model at the next step."""
        self._history, self._theta = NormHistory(**state.replicated), []

    def _report(self, norm: float, *, out: bool, all_out: bool, s: StepContext) -> None:
        """Log on rank 0 if this group is left out for the first time, or is averaged again."""
        was_out, self._is_out = self._is_out, out
        if s.topology.rank != 0 or out == was_out:
            return
        g, past = s.topology.replica_groups.index, self._history
        if not out:
            log.warning("step %d: group %d is averaged again: the norm of its change is %.4g", s.t, g, norm)
            return
        log.warning(
            "step %d: group %d is left out: the norm of its change is %.4g, before it was %.4g ± %.4g",
            s.t, g, norm, past.mean, math.sqrt(past.variance),
        )  # fmt: skip
        if all_out:
            log.warning(
                "step %d: all groups are left out and go back to the model of the last synchronization", s.t
            )


class _Weighted:
    """The contribution of group `index` to a mean in which all groups have the weights of `guard`.

    `norm`: the norm of the group's change; infinite if the group is to be left out. `weights`: the group's
    further weight, or nothing.
    """

    part: int | None = None

    def __init__(
        self,
        guard: PseudoGradientPenalty,
        quorum: Quorum | None,
        index: int,
        norm: float,
        shared: Sequence[Tensor],
        weights: Sequence[float],
    ) -> None:
        self._guard, self._index, self.shared, self.weights = guard, index, shared, weights
        self.norms: Sequence[float] = [norm]
        self.late_rounds = quorum.late_rounds if quorum is not None else 0
        self.tensors: Sequence[Tensor] = ()
        self.theta: Sequence[Tensor] = ()
        self.last_buffers: Sequence[Tensor] = ()
        """The model and the buffers after the last synchronization, which are averaged if all groups are left
        out."""
        self.shares: dict[int, float] = {}
        """The weights a_g of the groups that are not left out, by group."""
        self.left_out = self.t = 0
        """The number of groups that are left out, and the updates that the groups have done."""
        self.moved = False
        """True if the model of any averaged group has changed since the last synchronization."""
        self.counts = False
        """True if this group takes part in the round, even if it is left out of the mean."""

    def __call__(self, facts: Facts, newest: Sequence[Tensor] = ()) -> Sequence[Tensor]:
        """Return this group's tensors, scaled so that their plain mean over groups is the weighted mean.

        The factor is the group's weight times the number of groups in the mean. If all groups are left out,
        each returns the model and the buffers of the last synchronization.
        """
        norms, self.t = facts.norms, facts.t
        alone = len(norms) == 1
        kept = [g for g, (G,) in norms.items() if math.isfinite(G) or alone]
        self.shares = dict.fromkeys(kept, 1.0) if alone else self._shares_of(kept, facts)
        self.moved = any(norms[g][0] for g in kept)
        self.left_out, self.counts = len(norms) - len(kept), self._index in norms
        M = len(self.theta)
        if not kept:
            return [*(newest[:M] or self.theta), *self.last_buffers]
        factor = self.shares.get(self._index, 0.0) * len(norms)
        model, buffers = self.tensors[:M], self.tensors[M:]
        if newest:
            model = rebased(model, self.theta, newest[:M])
        return scaled([*model, *buffers], factor)

    def _shares_of(self, kept: Sequence[int], facts: Facts) -> dict[int, float]:
        """Return the weights a_g of the groups `kept`; they add up to 1."""
        shares = self._guard.weights([facts.norms[g][0] for g in kept]) if kept else []
        both = [a * w for a, g in zip(shares, kept, strict=True) for w in facts.weights[g]]
        total = math.fsum(both)
        return dict(zip(kept, [x / total for x in both] if total else shares, strict=True))
