"""SelSync: groups train alone while their gradients change little, and meet when those of any change much.

S. Tyagi, M. Swany: Accelerating Distributed ML Training via Selective Synchronization, IEEE CLUSTER 2023,
algorithm 1. In step i the worker n

    7   computes g_i, the gradient at its own w
    8   Δ(g_i) = |E‖g_i‖² − E‖g_{i−1}‖²| / E‖g_{i−1}‖²   (eq. 2), E a moving average
    9   updates w by g_i
    11  flag_n = 1 if Δ(g_i) ≥ δ
    14  gathers the flags of all
    15  if any is 1: w ← (1/N) Σ_n w_n   (16, 17: by parameters; by gradients 9 applies the mean of all g)

The paper's worker is a group here: its gradient is that of all its K ranks. Instead of flags all ranks
gather what they flag by, 8 bytes each: the parts of the squared norms. So every rank knows the Δ of every
group, none needs a second message for K > 1, and the numbers travel while the update is made.

Differences from the paper: allreduce instead of a parameter server. The moving average is of the last
`window` squared norms, with weights (1 − a)^age; with fewer steps done, of those there are. In the first
step, and after a gradient of zero, Δ is larger than any δ but infinity. Clipped gradients count as clipped.
Where the norm of any group is NaN or infinite they are so, too, and the average goes on without that step.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hpcsgd.arguments import checked
from hpcsgd.comm import Work, phase
from hpcsgd.core.averager import Averager, Traits
from hpcsgd.core.method import Method
from hpcsgd.core.optional import comm_ops
from hpcsgd.core.state import State
from hpcsgd.core.step import GradReduce, StepContext
from hpcsgd.core.traffic import FLOAT64, CommOp, ModelLayout, allreduce
from hpcsgd.core.traits import ScheduleTraits
from hpcsgd.core.waits import All
from hpcsgd.errors import UserError
from hpcsgd.methods.registry import method
from hpcsgd.parts.averagers import Mean, WithDistance, WithOptimizerState, keep_state
from hpcsgd.parts.grad_reduces import Dense

LARGEST = sys.float_info.max
"""Δ where there is none yet: only δ = ∞ is above it."""


class RelativeChange:
    """Δ(g) of eq. 2 for every group at once, from their squared norms (P numbers, float64) step by step.

    `smoothing` (a) in (0, 1]: 1 is without memory.
    """

    def __init__(self, window: int, smoothing: float) -> None:
        self.smoothing = smoothing
        self.norms: deque[Tensor] = deque(maxlen=window)
        self._average: Tensor | None = None

    def __call__(self, squared_norms: Tensor) -> Tensor:
        before = self._average
        if not squared_norms.isfinite().all():
            return torch.full_like(squared_norms, LARGEST)
        self.norms.append(squared_norms)
        self._average = self._mean()
        if before is None:
            return torch.full_like(squared_norms, LARGEST)
        change = (self._average - before).abs() / before
        return torch.where(self._average == before, 0.0, change).clamp(max=LARGEST)

    def restore(self, norms: list[Tensor]) -> None:
        """Go on after these."""
        self.norms.clear()
        self.norms.extend(norms)
        self._average = self._mean() if norms else None

    def _mean(self) -> Tensor:
        ages = torch.arange(len(self.norms) - 1, -1, -1, dtype=torch.float64, device="cpu")
        weights = (1 - self.smoothing) ** ages
        return weights @ torch.stack(list(self.norms)) / weights.sum()


class Significance:
    """Lines 8, 11 and 14: whether this step's update is to be shared, the same on every rank.

    Notes of this rank's group `delta` and `vote`, and whether all `met`.
    """

    def __init__(self, delta: float, window: int, smoothing: float | None) -> None:
        self.delta, self.window, self.smoothing = delta, window, smoothing
        self._change: RelativeChange | None = None
        self._saved: list[Tensor] = []
        self._gathering: Work | None = None
        self._significant = False
        self.traits = ScheduleTraits(threshold=delta)

    def begin(self, s: StepContext) -> None:
        """The exchanged gradient is there; returns at once."""
        if s.topology.num_groups == 1:
            return
        if self._change is None:
            a = min(s.topology.num_groups / 100, 1.0) if self.smoothing is None else self.smoothing
            self._change = RelativeChange(self.window, a)
            self._change.restore(self._saved)
        part = s.squared_norm().reshape(1)
        parts = self._parts = torch.empty(s.topology.world_size, dtype=torch.float64, device="cpu")

        def gather() -> None:
            s.topology.world.allgather(
                parts, part.cpu()
            ).wait()  # the lane waits for a device, not the update

        with phase("vote"):
            self._gathering = s.topology.world.run(gather, "vote", part)

    def __call__(self, s: StepContext) -> bool:
        """Waits for what `begin` sent."""
        if self._gathering is not None:
            assert self._change is not None
            with phase("vote"):
                self._gathering.wait()
            self._gathering = None
            changes = self._change(self._parts.view(s.topology.num_groups, s.topology.group_size).sum(1))
            votes = changes >= self.delta
            self._significant = bool(votes.any())
            mine = {
                "delta": changes[s.topology.group_index].item(),
                "vote": float(votes[s.topology.group_index].item()),
            }
            s.metrics.update(mine, met=float(self._significant))
        return self._significant

    def comm_ops(self, m: ModelLayout) -> list[CommOp]:
        """Line 11: in every step, one number of each rank."""
        return [CommOp("allgather", "world", FLOAT64 * m.N, "vote")] if m.P > 1 else []

    def state_dict(self) -> State:
        return State(per_rank={"norms": self._saved if self._change is None else list(self._change.norms)})

    def load_state_dict(self, state: State) -> None:
        self._saved, self._change = state.per_rank.get("norms", []), None


@dataclass(frozen=True)
class Watching:
    """Averages as `inner`, with the question whether to meet on its way before the update."""

    inner: Averager
    significance: Significance
    traits: Traits = field(init=False, repr=False)

    def __post_init__(self) -> None:
        traits = replace(self.inner.traits, reads_gradients=True, leaves_mean=False)
        object.__setattr__(self, "traits", traits)

    def prepare(self, vectors: Sequence[Tensor], s: StepContext) -> None:
        self.significance.begin(s)

    def average(self, vectors: Iterable[Tensor], s: StepContext) -> Iterable[Tensor]:
        return self.inner.average(vectors, s)

    def comm_ops(self, m: ModelLayout) -> list[CommOp]:
        return comm_ops(self.inner, m)


@dataclass(frozen=True)
class MeanGradient:
    """The mean of the groups' gradients takes the place of the own one, where the step is significant."""

    significance: Significance
    traits = Traits(All())

    def prepare(self, vectors: Sequence[Tensor], s: StepContext) -> None:
        self.significance.begin(s)
        if s.topology.num_groups > 1 and self.significance(s):
            with phase("average"):
                s.agreement().wait()
                for g in s.gradients():
                    s.topology.inter_group.allreduce(g, "mean").wait()

    def average(self, vectors: Iterable[Tensor], s: StepContext) -> Iterable[Tensor]:
        """All is done."""
        return vectors

    def comm_ops(self, m: ModelLayout) -> list[CommOp]:
        return [allreduce("cross", m.shard(b) * b.width) for b in m.buckets]


Aggregate = Callable[[Significance, WithOptimizerState], Averager]


def parameters(significance: Significance, moments: WithOptimizerState) -> Averager:
    """Groups leave a significant step with the mean of their models (PA)."""
    return Watching(moments(WithDistance(Mean())), significance)


def gradients(significance: Significance, moments: WithOptimizerState) -> Averager:
    """Groups apply the mean of their gradients in a significant step (GA), each to its own model."""
    if moments is not keep_state:
        raise UserError("selsync by gradients: groups do not meet, so moments can only be kept")
    return MeanGradient(significance)


AGGREGATES: Mapping[str, Aggregate] = {"gradients": gradients, "parameters": parameters}
"""As job files call them."""


@method(cite="tyagi2023selsync", delayable=True)
@checked
def selsync(
    delta: float,
    aggregate: Aggregate = parameters,
    window: int = 25,
    smoothing: float | None = None,
    grad_reduce: GradReduce = Dense(),  # noqa: B008 - frozen
    optimizer_state: WithOptimizerState = keep_state,
) -> Method:
    """Groups meet in the steps in which the gradient of any of them changes much.

    Δ is the relative change of a moving average of the squared norm of a group's gradient (eq. 2). A rank
    gathers 8 bytes from every other one in each step and sends 2·(P−1)/P·M/K elements in a step in which they
    meet. Noted in every step: `delta`, Δ of the own group, `vote`, whether it reached δ, and whether all
    `met`; at a meeting by parameters `distance`.

    Not to be confused with `adacomm`, which goes by the loss, and decides for many steps at once.

    Args:
        delta: δ, the Δ from which on a step is shared: 0 shares all, infinity none. `hpcsgd probe --delta`
            finds the one for a wanted share of steps alone.
        aggregate: what is averaged: `parameters` (PA) or `gradients` (GA), to be imported from
            `hpcsgd.methods.selsync`. Default parameters, ahead of gradients in the paper's runs with a
            decaying rate.
        window: squared norms in the moving average, in steps, at least 1. Default 25, the paper's.
        smoothing: a, the weight of the newest of them, > 0 and ≤ 1; 1 is without memory. Default None: P/100,
            and 1 at most, the paper's.
        grad_reduce: of gradients inside a group: `Dense()`, `AllToAll()`, `ReduceScatter()` or `Sparse(...)`.
            Default Dense().
        optimizer_state: what becomes of momentum at a meeting: `keep_state`, `AverageState` or `ResetState`;
            by gradients only `keep_state`. Default keep_state.

    Raises:
        UserError: for arguments outside these bounds.

    Example:
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, hpcsgd.selsync(delta=0.3))
        >>> train(optimizer, steps=1)
        >>> optimizer.metrics["met"]     # the first step has no Δ yet: it is shared
        1.0

    Source:
        S. Tyagi, M. Swany: Accelerating Distributed ML Training via Selective Synchronization, IEEE CLUSTER
        2023 (arXiv:2307.07950), algorithm 1.
    """
    if not delta >= 0:
        raise UserError(f"delta = {delta}: a change of the gradient, 0 or more", key="delta", value=delta)
    if window < 1:
        raise UserError(f"window = {window}: the average is of 1 step or more", key="window", value=window)
    if smoothing is not None and not 0 < smoothing <= 1:
        raise UserError(
            f"smoothing = {smoothing}: expected a number > 0 and ≤ 1", key="smoothing", value=smoothing
        )
    significance = Significance(float(delta), window, smoothing)
    return Method(
        grad_reduce=grad_reduce, schedule=significance, averager=aggregate(significance, optimizer_state)
    )
