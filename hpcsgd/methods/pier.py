"""Pier: DiLoCo after a lazy start, in which groups are synchronous and the outer momentum is warmed up.

S. Fan, Z. Zhang: Pier: Efficient Large Language Model pretraining with Relaxed Global Communication, 2025
(arXiv:2511.17849). We read its authors' code, not the paper. w is a group's model, θ that of the last
synchronization, and T the steps of the run. In the lazy start, up to step b·T, all groups average their
gradients in every step, so that they have one model. Every H steps the outer momentum m observes it:

    m ← μ·m + (θ − w)
    θ ← w

After that the groups train separately, and every H steps

    Δ ← (1/P) Σ_i (θ − w_i)
    m ← μ(t)·m + Δ
    θ ← θ − η(t)·(Δ + μ(t)·m),  w_i ← θ

with b = 0.1, μ = 0.9, and the η(t) and μ(t) of `hpcsgd.parts.outer_schedules.pier`.

Differences from the code:

- The lazy start ends with a synchronization: b·T is rounded down to a multiple of H.
- Any outer optimizer can be used. In the lazy start it takes its steps, and θ is then set to w, so that only
  its state remains.
- Each rank keeps θ and m of the shard that it owns, on the device of the model; the code keeps them in host
  memory.
- At the end of the lazy start groups take the mean of their models, as `switch` does. It changes at most the
  last bits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import Tensor

from hpcsgd.arguments import checked
from hpcsgd.core.method import Method
from hpcsgd.core.step import GroupGradReduce, StepContext
from hpcsgd.errors import UserError
from hpcsgd.methods.bsp import bsp
from hpcsgd.methods.diloco import OuterOptimizer
from hpcsgd.methods.registry import method
from hpcsgd.methods.switch import switch
from hpcsgd.parts import outer_schedules
from hpcsgd.parts.averagers import (
    NESTEROV,
    MakeOptimizer,
    Mean,
    WithDistance,
    WithOptimizerState,
    keep_state,
    mean_by,
)
from hpcsgd.parts.grad_reduces import Dense
from hpcsgd.parts.outer_schedules.base import OuterSchedule, require_useful
from hpcsgd.parts.outer_schedules.piecewise import require_total
from hpcsgd.parts.quantizers.base import Quantizer
from hpcsgd.parts.schedules import Every

log = logging.getLogger(__name__)

LONGEST = 0.7
"""The longest lazy start, as a fraction of the run. The rate has to rise before its last stage."""


class Observing:
    """The averager of the lazy start: `outer` observes how the common model moves, and changes nothing."""

    traits = Mean.traits

    def __init__(self, outer: OuterOptimizer) -> None:
        self._outer = outer

    def prepare(self, vectors: Sequence[Tensor], s: StepContext) -> None:
        self._outer.prepare(vectors, s)

    def average(self, vectors: Iterable[Tensor], s: StepContext) -> list[Tensor]:
        found = list(vectors)
        self._outer.observe(found)
        return found


@method(cite="fan2025pier")
@checked
def pier(
    sync_every: int,
    total_steps: int,
    lazy_fraction: float = 0.1,
    outer: MakeOptimizer = NESTEROV,
    outer_schedule: OuterSchedule | None = None,
    grad_reduce: GroupGradReduce = Dense(),  # noqa: B008 - frozen
    optimizer_state: WithOptimizerState = keep_state,
    quantize: Quantizer | None = None,
) -> Method:
    """Return Pier: `bsp` at first, while the outer momentum is warmed up, and then `diloco`.

    The first synchronizations after the lazy start may raise the loss for a while.

    Args:
        sync_every: Steps between two synchronizations (the paper's H), at least 1. The paper uses 50.
        total_steps: Steps of the whole run, 1 to 10^12. A job file need not say it: the default there is the
            length of the run.
        lazy_fraction: Fraction of the run in which the groups are synchronous, ≥ 0 and ≤ 0.7. It is rounded
            down to a multiple of `sync_every`. Default 0.1.
        outer: Function that makes the outer optimizer from a list of tensors, one per bucket. The optimizer
            must be element-wise. Its own momentum is that of the lazy start. Default Nesterov momentum 0.9.
        outer_schedule: Rate and momentum of the outer optimizer after the lazy start. Default None:
            `outer_schedules.pier` from the end of the lazy start on.
        grad_reduce: How gradients are averaged, in both parts: `Dense()`, `AllToAll()`, `ReduceScatter()` or
            `Sparse(...)`. The error feedback that `Sparse(...)` holds at the change is discarded, with a
            warning. Default Dense().
        optimizer_state: What happens to the inner optimizer's state at a synchronization: `keep_state`,
            `AverageState` or `ResetState`. Default keep_state.
        quantize: Format in which shards travel at a synchronization, such as `quantizers.int4()`. The first
            synchronization is not quantized. Default None: their own dtype.

    Returns:
        A `Method` for `DistributedOptimizer`. Use one instance per optimizer: it holds state.

    Raises:
        UserError: If an argument is outside these bounds, `outer` does not make a torch optimizer, or
            `outer_schedule` has a rate of 0 at the first synchronization.

    Shape:
        M parameters in total; each rank owns M/K of them. A rank sends what it does with `bsp`, and after the
        lazy start 2·(P−1)/P·M/K elements per synchronization. It keeps θ and each state tensor of the outer
        optimizer, M/K elements each.

    Note:
        After a synchronization, `optimizer.metrics` has "distance", "outer_lr" and "outer_momentum".

    Example:
        >>> method = hpcsgd.pier(sync_every=2, total_steps=20, lazy_fraction=0.2)
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> train(optimizer, steps=4)
        >>> "distance" in optimizer.metrics     # no model was averaged, only gradients
        False
        >>> train(optimizer, steps=2)
        >>> round(optimizer.metrics["outer_lr"], 3), optimizer.metrics["outer_momentum"]
        (1.1, 0.9)

    References:
        S. Fan, Z. Zhang: Pier: Efficient Large Language Model pretraining with Relaxed Global Communication,
        2025 (arXiv:2511.17849).

    See Also:
        `diloco`: the same without a lazy start.
    """
    when = Every(sync_every)
    require_total(total_steps)
    if not 0 <= lazy_fraction <= LONGEST:
        raise UserError(
            f"lazy_fraction = {lazy_fraction}: expected a fraction of the run from 0 to {LONGEST}",
            key="lazy_fraction",
            value=lazy_fraction,
        )
    end = int(round(lazy_fraction * total_steps, 6)) // sync_every * sync_every
    if end == 0 < lazy_fraction:
        log.warning(
            "pier: there is no lazy start, because lazy_fraction = %g of total_steps = %d is less than "
            "sync_every = %d", lazy_fraction, total_steps, sync_every,
        )  # fmt: skip
    schedule = outer_schedule
    if schedule is None:
        schedule = outer_schedules.pier(total_steps, end / total_steps)
    require_useful(schedule, sync_every, end)
    mean = mean_by(quantize)
    how = OuterOptimizer(WithDistance(mean), outer, mean.set_reference, schedule)
    lazy = replace(bsp(grad_reduce), schedule=when, averager=Observing(how))
    return switch(lazy, Method(grad_reduce, when, optimizer_state(how)), end)
