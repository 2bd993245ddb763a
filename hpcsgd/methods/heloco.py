"""HeLoCo: asynchronous DiLoCo whose server turns late updates towards its momentum.

A. Al Asif, P. Diem, J. P. Muñoz, F. Wolf, A. Jannesari, A. Mazaheri: HeLoCo: Efficient asynchronous
low-communication training under data and device heterogeneity, 2026 (arXiv:2606.00271). We read its abstract
and a summary of its equations, not the paper. A group reads the server's model θ, trains H steps to w, and
sends the pseudo-gradient Δ = θ − w for the θ that it has read. Meanwhile others have changed the server's
model, and Δ may point against the direction in which it moves, that of the server's momentum m (0 at first).
So the server corrects each tensor of Δ. With c the cosine of the angle between Δ and m, and

    conf = ‖Δ‖ / (‖Δ‖ + κ·‖m‖)

    c ≥ c_ok:       Δ̂ = Δ
    c < 0:          Δ̂ = Δ − β·c·‖Δ‖·m/‖m‖,   β = min(k_s·(−c)·conf, β_max)
    0 ≤ c < c_ok:   Δ̂ = ‖Δ‖·u/‖u‖,   u = (1 − λ)·Δ/‖Δ‖ + λ·m/‖m‖,   λ = min(k_d·(1 − c)·conf, 1)

An update that points against m loses a part of what points against it. One that is nearly at a right angle
to m is turned towards it and keeps its length. Then

    m ← μ·m + (1 − μ)·Δ̂
    θ ← θ − η·(Δ̂ + μ·m)

and the group continues from the new θ without waiting for others.

Differences from the paper:

- The paper's worker is a group here. The server's model and momentum are distributed over all ranks, in host
  memory. A rank corrects those elements of a tensor that it has, by their own c, ‖Δ‖ and ‖m‖. So a tensor on
  several ranks is corrected in several pieces, and results depend on P, on K and on `bucket_cap_mb`.
- The values of c_ok, k_s, β_max, k_d and κ are ours: the summary has none.
- η is `outer_lr` divided by the number of groups.
- The paper may weight Δ̂ by the group or its delay (ρ). Here all weights are 1.
- A tensor of which Δ or m is zero is not corrected.
- Groups may take numbers of steps by their speed, as in `async_diloco`.
- For 16-bit parameters θ and m are float32, and Δ is measured from θ rounded to the parameters' dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpcsgd.arguments import checked
from hpcsgd.core.method import Method
from hpcsgd.core.norm import squared_norm
from hpcsgd.core.step import GradReduce
from hpcsgd.methods.async_diloco import without_waiting
from hpcsgd.methods.registry import method
from hpcsgd.parts.averagers.by_tensor import ByTensor
from hpcsgd.parts.averagers.message_buffer import MessageBuffer
from hpcsgd.parts.averagers.server_rule import ServerRates, require
from hpcsgd.parts.grad_reduces import Dense
from hpcsgd.parts.outer_schedules.base import OuterSchedule
from hpcsgd.parts.schedules import DynamicLocalSteps

PAPER = """
@misc{asif2026heloco,
  title = {{HeLoCo}: Efficient asynchronous low-communication training under data and device heterogeneity},
  author = {Al Asif, Abdullah and Diem, Patrick and Mu{\\~n}oz, Juan Pablo and Wolf, Felix and Jannesari, Ali
  and Mazaheri, Arya}, year = {2026},
  eprint = {2606.00271},
  archivePrefix = {arXiv},
}
"""


@dataclass(frozen=True)
class Correction:
    """The numbers of the correction, which are arguments of `heloco`."""

    keep_from: float
    shrink: float
    max_shrink: float
    turn: float
    momentum_weight: float

    def __post_init__(self) -> None:
        require("keep_from", self.keep_from, 0 <= self.keep_from <= 1, "a cosine from 0 to 1")
        for name in ("shrink", "turn", "momentum_weight"):
            value = getattr(self, name)
            require(name, value, 0 <= value < math.inf, "a finite number ≥ 0")
        require("max_shrink", self.max_shrink, 0 <= self.max_shrink <= 1, "a share from 0 to 1")

    def shares(self, delta: float, m: float, product: float) -> tuple[float, float]:
        """Return a and b of Δ̂ = a·Δ + b·m, for ‖Δ‖ = `delta`, ‖m‖ = `m` and ⟨Δ, m⟩ = `product`."""
        if delta == 0 or m == 0:
            return 1.0, 0.0
        c, confidence = product / (delta * m), delta / (delta + self.momentum_weight * m)
        if c < 0:
            beta = min(self.shrink * -c * confidence, self.max_shrink)
            return 1.0, -beta * c * delta / m
        if c < self.keep_from:
            turned = min(self.turn * (1 - c) * confidence, 1.0)
            kept = 1 - turned
            length = math.sqrt(kept**2 + turned**2 + 2 * kept * turned * c)
            return kept / length, turned * delta / (m * length)
        return 1.0, 0.0


class CorrectedNesterov:
    """The server's rule: Nesterov momentum of updates that are corrected tensor by tensor."""

    vectors_per_part = 2

    def __init__(self, rates: ServerRates, correction: Correction) -> None:
        self._rates, self._correction = rates, correction

    def begin(self, part: Sequence[Tensor], tensors: ByTensor, P: int) -> None:
        self.theta, self._tensors, self._P = part, tensors, P
        self.m, self._delta = ([torch.zeros_like(x) for x in part] for _ in range(2))

    def apply(self, update: MessageBuffer, t: int) -> None:
        lr, mu = self._rates.at(t, self._P)
        update.unpack(self._delta)
        for delta in self._delta:
            delta.neg_()  # the update is w − θ
        pieces = zip(self._tensors.views(self._delta), self._tensors.views(self.m), strict=True)
        for (_, delta), (_, m) in pieces:
            self._correct(delta, m)
        for theta, m, delta in zip(self.theta, self.m, self._delta, strict=True):
            m.mul_(mu).add_(delta, alpha=1 - mu)
            theta.sub_(delta.add_(m, alpha=mu), alpha=lr / self._P)

    def metrics(self, t: int) -> Mapping[str, float]:
        return self._rates.metrics(t, self._P)

    def vectors(self) -> Mapping[str, Sequence[Tensor]]:
        return {"mean update": self.m}

    def numbers(self) -> Mapping[str, Any]:
        return {}

    def restore(self, vectors: Mapping[str, Sequence[Tensor]], numbers: Mapping[str, Any]) -> str:
        for m, saved in zip(self.m, vectors["mean update"], strict=True):
            m.copy_(saved)
        return ""

    def _correct(self, delta: Tensor, m: Tensor) -> None:
        lengths = [math.sqrt(squared_norm(x)) for x in (delta, m)]
        kept, added = self._correction.shares(lengths[0], lengths[1], float(torch.dot(delta, m)))
        if added != 0:
            delta.mul_(kept).add_(m, alpha=added)


@method(cite=PAPER)
@checked
def heloco(
    sync_every: int,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    keep_from: float = 0.3,
    shrink: float = 1.0,
    max_shrink: float = 1.0,
    turn: float = 0.5,
    momentum_weight: float = 1.0,
    local_steps: DynamicLocalSteps | None = None,
    max_staleness: int | None = None,
    grad_reduce: GradReduce = Dense(),  # noqa: B008 - frozen
    outer_schedule: OuterSchedule | None = None,
) -> Method:
    """Return HeLoCo: asynchronous DiLoCo that corrects updates which point against the server's momentum.

    Use it where groups are of unlike speed and see unlike data, so that late updates of slow groups do harm.
    The model is the server's: evaluate inside `optimizer.averaged_model()`. It has the groups' steps up to
    their last synchronizations.

    Args:
        sync_every: Steps of a group between two synchronizations (the paper's H), at least 1. With
            `local_steps` these are the steps of the fastest group.
        outer_lr: P times the server's rate η, above 0. Default 0.7.
        outer_momentum: The server's momentum μ, ≥ 0 and below 1. The momentum is an average, so it
            makes steps at most 1 + μ times as long. Default 0.9.
        keep_from: Cosine between update and momentum from which on an update stays as it is (c_ok), 0 to 1.
            Default 0.3.
        shrink: How much of what points against the momentum is taken away (k_s), 0 or more. Default 1.0.
        max_shrink: The largest share that is taken away (β_max), 0 to 1. Default 1.0.
        turn: How far an update is turned towards the momentum (k_d), 0 or more. Default 0.5.
        momentum_weight: How much a long momentum reduces the corrections (κ), 0 or more. Default 1.0.
        local_steps: How the groups' numbers of steps follow from their speeds: `DynamicLocalSteps()`. Default
            None: every group takes `sync_every` steps.
        max_staleness: Synchronizations that a group may be ahead of the slowest one, 0 or more. Default None:
            no limit.
        grad_reduce: How the gradients of a group are averaged in every step: `Dense()`, `AllToAll()`,
            `ReduceScatter()` or `Sparse(...)`. Default Dense().
        outer_schedule: Rate and momentum of the server over the run, such as
            `outer_schedules.piecewise(...)`. The step is that of the group that sends the update. Default
            None: `outer_lr` and `outer_momentum`.

    Returns:
        A `Method` for `DistributedOptimizer`. Use one instance per optimizer: it holds state.

    Raises:
        UserError: If an argument is outside these bounds, `max_staleness` is given together with
            `local_steps`, or `outer_schedule` has a rate of 0 at the first synchronization.

    Shape:
        M parameters in total. A rank sends and receives (P−1)/P·M/K elements per synchronization for its own
        group, and as much again for its part of the server. It keeps θ, m and one pseudo-gradient of its
        part, M/(P·K) elements each, in host memory.

    Note:
        After a synchronization, `optimizer.metrics["staleness"]` counts the updates by other groups since
        this group's last read, and `optimizer.metrics["ahead"]` by how many updates the group is ahead of the
        slowest one. With `outer_schedule` there are "outer_lr" and "outer_momentum".

        With `keep_from=0` and `shrink=0` nothing is corrected. Updates are applied in the order in which they
        arrive, so two runs do not give the same bits. Each group keeps its inner optimizer state. A
        checkpoint keeps the groups' models and what they have read.

    Example:
        >>> method = hpcsgd.heloco(sync_every=2)
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> train(optimizer, steps=4)
        >>> optimizer.metrics["staleness"] >= 0
        True

    References:
        A. Al Asif et al.: HeLoCo: Efficient asynchronous low-communication training under data and device
        heterogeneity, 2026 (arXiv:2606.00271).

    See Also:
        `async_diloco`: the same without the correction, with a momentum that changes every N updates.
    """
    rates = ServerRates(outer_lr, outer_momentum, outer_schedule)
    rule = CorrectedNesterov(rates, Correction(keep_from, shrink, max_shrink, turn, momentum_weight))
    return without_waiting(rule, rates, sync_every, local_steps, max_staleness, grad_reduce)
