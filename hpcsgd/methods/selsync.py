"""SelSync: groups train alone while their gradients change little, and average when any changes much.

S. Tyagi, M. Swany: Accelerating Distributed ML Training via Selective Synchronization, IEEE CLUSTER 2023,
algorithm 1. In step i the worker n

    7   computes g_i, the gradient at its own model w_n
    8   computes Δ(g_i) = |E‖g_i‖² − E‖g_{i−1}‖²| / E‖g_{i−1}‖²   (eq. 2), where E is a moving average
    9   updates w_n by g_i
    11  sets flag_n = 1 if Δ(g_i) ≥ δ
    14  gathers the flags of all N workers
    15  if any flag is 1, sets w_n ← (1/N) Σ_n w_n   (lines 16 and 17)

The paper can also average gradients instead of models: then line 9 applies the mean gradient.

The paper's worker is a group here: its gradient is the mean of those of its K ranks. Instead of a flag, every
rank sends its part of the squared norm of its group's gradient, 8 bytes. All ranks compute the flags from
these numbers. So every rank knows the Δ of every group without a second message for K > 1, and the numbers
travel during the update.

Differences from the paper:

- An allreduce takes the place of the parameter server.
- The moving average covers the last `window` squared norms, with weights (1 − a)^age, where a is `smoothing`
  and age counts steps. During the first steps it covers those that exist.
- In the first step, and after a gradient of zero, Δ is larger than any finite δ.
- Gradients are measured after clipping.
- If the norm of any group is NaN or infinite, Δ of all groups is larger than any finite δ, too, and the
  moving average skips this step.
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
from hpcsgd.core.averager import Averager, Traits, run_averager
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
"""The value of Δ if Δ is not defined: at least any threshold δ except infinity."""


class RelativeChange:
    """A function that computes Δ of eq. 2 for all groups, from the squared norms of a step's gradients.

    It gets a float64 vector of P squared norms, one per group, and returns a vector of P values of Δ. It
    remembers the last `window` vectors for the moving average. `smoothing` (a) is in (0, 1]; with 1 only the
    newest norms count.
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
        """Replace the remembered squared norms with `norms`, one vector per step, oldest first."""
        self.norms.clear()
        self.norms.extend(norms)
        self._average = self._mean() if norms else None

    def _mean(self) -> Tensor:
        ages = torch.arange(len(self.norms) - 1, -1, -1, dtype=torch.float64, device="cpu")
        weights = (1 - self.smoothing) ** ages
        return weights @ torch.stack(list(self.norms)) / weights.sum()


class Significance:
    """The schedule of lines 8, 11 and 14: the groups share a step if Δ of any group reached δ.

    All ranks decide alike. Its metrics are `delta` (Δ of this group), `wants_sync` (1.0 if that Δ reached δ),
    and `synced` (1.0 if all groups share the step).
    """

    def __init__(self, delta: float, window: int, smoothing: float | None) -> None:
        self.delta, self.window, self.smoothing = delta, window, smoothing
        self._change: RelativeChange | None = None
        self._saved: list[Tensor] = []
        self._gathering: Work | None = None
        self._significant = False
        self.traits = ScheduleTraits(threshold=delta)

    def begin(self, s: StepContext) -> None:
        """Start to gather the squared norms of the reduced gradients from all ranks; do not wait for them."""
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
            ).wait()  # `part.cpu()` waits for the device on this thread, so that the update need not wait

        with phase("sync_decision"):
            self._gathering = s.topology.world.run(gather, "sync_decision", part)

    def __call__(self, s: StepContext) -> bool:
        """Wait for the allgather of `begin`; return whether Δ of any group reached δ in this step."""
        if self._gathering is not None:
            assert self._change is not None
            with phase("sync_decision"):
                self._gathering.wait()
            self._gathering = None
            changes = self._change(self._parts.view(s.topology.num_groups, s.topology.group_size).sum(1))
            votes = changes >= self.delta
            self._significant = bool(votes.any())
            mine = {
                "delta": changes[s.topology.group_index].item(),
                "wants_sync": float(votes[s.topology.group_index].item()),
            }
            s.metrics.update(mine, synced=float(self._significant))
        return self._significant

    def comm_ops(self, m: ModelLayout) -> list[CommOp]:
        """Return the operation of line 14, which gathers one number from each rank in every step."""
        return [CommOp("allgather", "world", FLOAT64 * m.N, "sync_decision")] if m.P > 1 else []

    def state_dict(self) -> State:
        return State(per_rank={"norms": self._saved if self._change is None else list(self._change.norms)})

    def load_state_dict(self, state: State) -> None:
        self._saved, self._change = state.per_rank.get("norms", []), None


@dataclass(frozen=True)
class Watching:
    """The averager `inner`, which before each update also starts the allgather that `significance` needs."""

    inner: Averager
    significance: Significance
    traits: Traits = field(init=False, repr=False)

    def __post_init__(self) -> None:
        traits = replace(self.inner.traits, reads_gradients=True, leaves_mean=False)
        object.__setattr__(self, "traits", traits)

    def prepare(self, vectors: Sequence[Tensor], s: StepContext) -> None:
        if s.in_step:
            self.significance.begin(s)

    def average(self, vectors: Iterable[Tensor], s: StepContext) -> Iterable[Tensor]:
        return self.inner.average(vectors, s)

    def comm_ops(self, m: ModelLayout) -> list[CommOp]:
        return comm_ops(self.inner, m)


@dataclass(frozen=True)
class MeanGradient:
    """The averager that, in a significant step, sets each group's gradient to the mean over all groups."""

    significance: Significance
    traits = Traits(All())

    def prepare(self, vectors: Sequence[Tensor], s: StepContext) -> None:
        if not s.in_step:
            return
        self.significance.begin(s)
        if s.topology.num_groups > 1 and self.significance(s):
            with phase("model_average"):
                s.agreement().wait()
                for g in s.gradients():
                    s.topology.inter_group.allreduce(g, "mean").wait()

    def average(self, vectors: Iterable[Tensor], s: StepContext) -> Iterable[Tensor]:
        """In a step, return `vectors` unchanged: `prepare` has averaged the gradients."""
        return vectors if s.in_step else run_averager(Mean(), vectors, s)

    def comm_ops(self, m: ModelLayout) -> list[CommOp]:
        return [allreduce("inter_group", m.shard(b) * b.width) for b in m.buckets]


Aggregate = Callable[[Significance, WithOptimizerState], Averager]
"""A function that returns the averager for the steps that `Significance` selects."""


def parameters(significance: Significance, moments: WithOptimizerState) -> Averager:
    """Return an averager that averages the groups' models in a significant step (PA).

    `moments` wraps the averager in one that also keeps, averages or resets the optimizer state.
    """
    return Watching(moments(WithDistance(Mean())), significance)


def gradients(significance: Significance, moments: WithOptimizerState) -> Averager:
    """Return an averager that averages the groups' gradients in a significant step (GA).

    Each group applies the mean to its own model.
    """
    if moments is not keep_state:
        raise UserError("optimizer_state: with aggregate gradients it can only be keep_state")
    return MeanGradient(significance)


AGGREGATES: Mapping[str, Aggregate] = {"gradients": gradients, "parameters": parameters}
"""The values of `aggregate`, by their names in job files."""


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
    """Return selective synchronization: groups average in steps in which a gradient changes much.

    Δ is the relative change of a moving average of the squared norm of a group's gradient (eq. 2). All groups
    share the step if Δ of any group reaches δ.

    Args:
        delta: Threshold δ: the step is shared from this Δ on. 0 shares all steps, infinity shares none.
            `hpcsgd probe --delta` finds δ for a wanted share of local steps.
        aggregate: What is averaged: `parameters` (PA) or `gradients` (GA); import them from
            `hpcsgd.methods.selsync`. Default parameters, which did better than gradients in the paper's runs
            with a decaying learning rate.
        window: Number of squared norms in the moving average, in steps, at least 1. Default 25, the paper's.
        smoothing: Weight a of the newest squared norm, > 0 and ≤ 1. With 1 only the newest counts. Default
            None: P/100, at most 1, as in the paper.
        grad_reduce: How the gradients of a group are averaged in every step: `Dense()`, `AllToAll()`,
            `ReduceScatter()` or `Sparse(...)`. Default Dense().
        optimizer_state: What happens to momentum and other optimizer state at a synchronization:
            `keep_state`, `AverageState` or `ResetState`. With `gradients` only `keep_state` is allowed.
            Default keep_state.

    Returns:
        A `Method` for `DistributedOptimizer`. Use one instance per optimizer: it holds state.

    Raises:
        UserError: If an argument is outside these bounds.

    Shape:
        M parameters in total; each rank owns M/K of them. In every step a rank gathers 8 bytes from every
        other rank. In a shared step it sends 2·(P−1)/P·M/K elements more.

    Note:
        After every step, `optimizer.metrics` has `delta` (Δ of this group), `wants_sync` (1.0 if it reached
        δ) and `synced` (1.0 if the step was shared). After a synchronization with `parameters` it also has
        `distance`.

    Example:
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, hpcsgd.selsync(delta=0.3))
        >>> train(optimizer, steps=1)
        >>> optimizer.metrics["wants_sync"]     # the first step has no Δ yet: it is shared
        1.0

    References:
        S. Tyagi, M. Swany: Accelerating Distributed ML Training via Selective Synchronization, IEEE CLUSTER
        2023 (arXiv:2307.07950), algorithm 1.

    See Also:
        `adacomm`: decides by the loss, and for many steps at once.
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
    return Method(grad_reduce, significance, aggregate(significance, optimizer_state))
