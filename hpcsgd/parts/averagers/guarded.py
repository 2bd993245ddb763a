"""Guarded averaging: a group whose change is an outlier of its own history is left out of the mean.

J. Cheng et al.: EDiT: A Local-SGD-Based Efficient Distributed Training Method for Large Language Models, ICLR
2025 (arXiv:2412.07210), which calls it the pseudo gradient penalty. θ is the model after the last
synchronization, and w_g the model of group g:

    Δ_g = w_g − θ,   G_g = ‖Δ_g‖₂
    group g is left out      if G_g is not finite, or G_g − m_g > z·σ_g
    a_g = exp(−G_g/τ) / Σ_j exp(−G_j/τ)   over the other groups, τ = T·median_j G_j
    Δ̄ = Σ_g a_g·Δ_g
    Δ̄ ← Δ̄·min(1, φ/(‖Δ̄‖₂ + 10⁻⁶))
    w_g ← θ + Δ̄             for every group; θ if all groups are left out

m_g and σ_g² are the mean and the variance of earlier norms of group g. Norms that were left out do not count,
nor do those of 0, of a group that has not trained since the last synchronization.
With δ = G_g − m_g and r = max(a, 1/n) for the n-th norm:

    m_g ← m_g + r·δ,   σ_g² ← (1 − r)·(σ_g² + r·δ²)

Differences from the paper and its authors' code:

- A norm covers the whole model, not one module.
- τ follows the norms. In the paper it is a constant, so models of other sizes get other weights.
- The code's averages start from 0. Here the first 1/a norms count alike, so the test can begin earlier.
- The test uses z alone. The code also multiplies it by the deviation of recent scores.
- If all groups are left out, their finite norms do count. Otherwise a learning rate that rises at once would
  end the training: all groups would be left out for ever.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from hpcsgd.comm import accumulation_dtype, phase
from hpcsgd.core.averager import Averager, run_averager
from hpcsgd.core.norm import clip, squared_norm, sum_on_host
from hpcsgd.core.optional import comm_ops
from hpcsgd.core.state import State
from hpcsgd.core.step import StepContext
from hpcsgd.core.traffic import FLOAT64, CommOp, ModelLayout, allreduce
from hpcsgd.parts.averagers.pseudo_gradient_penalty import NormHistory, PseudoGradientPenalty, of_groups

log = logging.getLogger(__name__)

PHASE = "guard"


class MovableMean(Averager, Protocol):
    """An averager to guard: it leaves groups with their mean, and can be given another reference."""

    def set_reference(self, common: Sequence[Tensor]) -> None: ...


class Guarded:
    """The averager `inner`, a mean of the groups' models, which `guard` protects from outliers.

    If the groups' models may differ before the first synchronization, `inner` alone carries that one out, and
    so gives them a common model θ.
    """

    def __init__(self, inner: MovableMean, guard: PseudoGradientPenalty) -> None:
        self.inner, self.guard = inner, guard
        self.traits = replace(inner.traits, leaves_mean=False, mean_of="")
        self._theta: list[Tensor] = []
        self._histories: list[NormHistory] = []
        self._reported: tuple[int, ...] = ()
        """The groups that are left out according to the log."""

    def prepare(self, vectors: Sequence[Tensor], s: StepContext) -> None:
        if s.t == 1 and s.topology.num_groups > 1 and not self._theta:  # all groups have the initial model
            self._begin(vectors)

    def average(self, vectors: Iterable[Tensor], s: StepContext) -> list[Tensor]:
        found = list(vectors)
        if not self._theta:
            run_averager(self.inner, found, s)
            self._begin(found)
            return found
        s.agreement().wait()
        weights = self._weights(self._norms(found, s), s)
        if len(s.left_out) == len(weights):
            self._set(found, 0.0)
        else:
            self._set(found, weights[s.topology.group_index] * len(weights))
            run_averager(self.inner, found, s)
            self._clip(found, s)
        self.set_reference(found)
        return found

    def set_reference(self, common: Sequence[Tensor]) -> None:
        """Set θ to `common`, the model from which all groups train on."""
        for theta, w in zip(self._theta, common, strict=True):
            theta.copy_(w)
        self.inner.set_reference(common)

    def memory_bytes(self, m: ModelLayout) -> float:
        return m.own_elements()

    def comm_ops(self, m: ModelLayout) -> Iterator[CommOp]:
        yield allreduce("intra_group", FLOAT64, PHASE)
        yield CommOp("allgather", "inter_group", FLOAT64 * m.P, PHASE)
        yield from (replace(x, bucket=None) for x in comm_ops(self.inner, m))  # norms need all buckets
        if self.guard.max_norm is not None:
            yield allreduce("intra_group", FLOAT64, PHASE)

    def state_dict(self) -> State:
        names = ("mean", "variance", "count")
        replicated = {name: [getattr(each, name) for each in self._histories] for name in names}
        return State(replicated=replicated, sharded={"theta": self._theta} if self._theta else {})

    def load_state_dict(self, state: State) -> None:
        """Load the state; if it has no θ, the next synchronization is treated as the first."""
        saved = state.replicated
        self._histories = [
            NormHistory(*each) for each in zip(saved["mean"], saved["variance"], saved["count"], strict=True)
        ]
        self._theta = state.sharded.get("theta", [])

    def _begin(self, common: Sequence[Tensor]) -> None:
        self._theta = [w.clone() for w in common]

    def _norms(self, found: Sequence[Tensor], s: StepContext) -> list[float]:
        """Return the norm G_g of the change of each group g, over the whole model; collective."""
        changes = (w - theta for w, theta in zip(found, self._theta, strict=True))
        with phase(PHASE):
            squared = sum_on_host(squared_norm(x) for x in changes)
            s.topology.intra_group.allreduce(squared).wait()
            norms = squared.new_empty(s.topology.num_groups)
            s.topology.inter_group.allgather(norms, squared.sqrt().view(1)).wait()
        return norms.tolist()

    def _weights(self, norms: Sequence[float], s: StepContext) -> list[float]:
        """Return the weights of all groups, 0 for those left out, and take `norms` into the histories."""
        before = self._histories = of_groups(self._histories, len(norms))
        out = [past.is_outlier(G, self.guard) for past, G in zip(before, norms, strict=True)]
        counts = [math.isfinite(G) and (all(out) or not x) for G, x in zip(norms, out, strict=True)]
        self._histories = [
            past.including(G, self.guard) if valid else past
            for past, G, valid in zip(before, norms, counts, strict=True)
        ]
        kept = [G for G, x in zip(norms, out, strict=True) if not x]
        weights = iter(self.guard.weights(kept) if kept else [])
        found = [0.0 if x else next(weights) for x in out]
        s.left_out = tuple(g for g, x in enumerate(out) if x)
        s.metrics["groups_left_out"] = float(len(s.left_out))
        s.metrics["min_weight"] = min((a for a, x in zip(found, out, strict=True) if not x), default=0.0)
        self._report(norms, before, s)
        return found

    def _set(self, found: Sequence[Tensor], factor: float) -> None:
        """Set this group's vectors w to θ + `factor`·Δ; a factor of 0 gives θ even if Δ is not finite."""
        for w, theta in zip(found, self._theta, strict=True):
            if factor == 0:
                w.copy_(theta)
            elif factor != 1:
                start = theta.to(accumulation_dtype(theta.dtype))
                w.copy_(start + (w.to(start.dtype) - start) * factor)

    def _clip(self, found: Sequence[Tensor], s: StepContext) -> None:
        """Clip the mean change of the model, whose shards on this rank are `found`."""
        if (most := self.guard.max_norm) is None:
            return
        starts = [theta.to(accumulation_dtype(theta.dtype)) for theta in self._theta]
        changes = [w - start for w, start in zip(found, starts, strict=True)]
        with phase(PHASE):
            total = clip(changes, most, 2.0, s.topology.intra_group)
        if total + 1e-6 > most:
            for w, start, change in zip(found, starts, changes, strict=True):
                torch.add(start, change, out=change)
                w.copy_(change)

    def _report(self, norms: Sequence[float], before: Sequence[NormHistory], s: StepContext) -> None:
        """Log on rank 0 which groups are left out from now on, and which are back."""
        reported, self._reported = self._reported, s.left_out
        if s.topology.rank != 0 or reported == s.left_out:
            return
        for g in (g for g in s.left_out if g not in reported):
            log.warning(
                "step %d: group %d is left out: the norm of its change is %.4g, before it was %.4g ± %.4g",
                s.t, g, norms[g], before[g].mean, math.sqrt(before[g].variance),
            )  # fmt: skip
        for g in (g for g in reported if g not in s.left_out):
            log.warning(
                "step %d: group %d is averaged again: the norm of its change is %.4g", s.t, g, norms[g]
            )
        if len(s.left_out) == len(norms):
            log.warning(
                "step %d: all groups are left out and go back to the model of the last synchronization", s.t
            )


def guarded(mean: MovableMean, guard: PseudoGradientPenalty | None) -> MovableMean:
    """Return the averager `mean`, guarded by `guard` unless that is None."""
    return mean if guard is None else Guarded(mean, guard)
