"""Delayed averaging: groups train on while their models are averaged, and use the mean some steps later.

A synchronization begins with w_t, the models after update t, and its result is used d updates later:

    w̄_t = the averager's result for w_t                  while updates t+1 … t+d are made
    w ← w̄_t + (w_{t+d} − w_t)                            after update t+d

so that no update is lost. With d = 0 the training is that of the method itself. Only one average is pending
at a time. If two were, the later one would subtract the difference between the groups a second time.

The idea of late averages is from Q. Zhou et al.: DaSGD: Squeezing SGD Parallelization Performance in
Distributed Training Using Delayed Averaging, 2020 (arXiv:2006.00441). The form above is the simplest that
works with any optimizer and averager. DASO (Heat) weights the two models by steps instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from hpcsgd.arguments import checked
from hpcsgd.comm import accumulation_dtype
from hpcsgd.core.averager import Averager, run_averager
from hpcsgd.core.method import Method
from hpcsgd.core.optional import comm_ops
from hpcsgd.core.state import State
from hpcsgd.core.step import StepContext
from hpcsgd.core.topology import Topology
from hpcsgd.core.traffic import CommOp, ModelLayout, overlapped
from hpcsgd.core.waits import later
from hpcsgd.errors import UserError
from hpcsgd.methods.registry import DELAYABLE, method
from hpcsgd.parts.averagers.pending_average import PendingAverage, begin, on_own_thread

PAPER = """
@misc{zhou2020dasgd,
  title = {{DaSGD}: Squeezing {SGD} Parallelization Performance in Distributed Training Using Delayed
  Averaging}, author = {Zhou, Qinggang and others},
  year = {2020},
  eprint = {2006.00441},
  archivePrefix = {arXiv},
}
"""


class Delayed:
    """The averager `inner` in the background: groups use each result `steps` ≥ 1 updates after it began.

    If `average` is called when no result is due, it first applies the pending average, if there is one, and
    then averages at once. The metric `distance` is measured at w_t, the models that were averaged, and is
    reported when the result is used.
    """

    def __init__(self, inner: Averager, steps: int) -> None:
        self.inner = inner
        self.steps = steps
        waits = later(inner.traits.waits, steps)
        self.traits = replace(inner.traits, waits=waits, leaves_mean=False, mean_of="", vectors_only=False)
        self._pending: PendingAverage | None = None
        self._brought: list[Tensor] = []
        """The shards w_t with which the pending average began."""
        self._wanted = 0
        """The last update after which the schedule wanted a synchronization."""
        self._on_own_thread: Topology | None = None

    def is_due(self, s: StepContext, wanted: bool) -> bool:
        """Return whether the result of the pending average must be used after this update.

        If the schedule wants a synchronization (`wanted`), record the update, so that `begin` starts it. It
        is skipped if an average is still pending then.
        """
        if wanted:
            self._wanted = s.t
        return self._pending is not None and self._pending.due <= s.t

    def begin(self, vectors: Sequence[Tensor], s: StepContext) -> None:
        if self._wanted != s.t or self._pending is not None:
            return
        if self._on_own_thread is None:
            self._on_own_thread = on_own_thread(s.topology)
        self._brought = [own.clone() for own in vectors]
        copies = [x.clone() for x in self._brought]
        self._pending = begin(
            partial(run_averager, self.inner), s, self._on_own_thread, copies, s.t + self.steps
        )

    def average(self, vectors: Iterable[Tensor], s: StepContext) -> list[Tensor]:
        found = list(vectors)
        at_once = self._pending is None or self._pending.due > s.t
        self.finish(found, s)
        if at_once:
            return run_averager(self.inner, found, s)
        self.begin(found, s)
        return found

    def finish(self, vectors: Sequence[Tensor], s: StepContext, due: bool = False) -> None:
        """Wait for the pending average, if there is one, and apply w ← w̄_t + (w − w_t) to `vectors` (w).

        A group that the average left out takes w ← w̄_t: the rest of its movement is no better.
        """
        if self._pending is None:
            return
        self._pending.wait()
        left_out = s.topology.group_index in self._pending.left_out
        # A state that was loaded and saved by a run with one group no longer has vectors.
        mine: Sequence[Tensor] = vectors if self._brought else ()
        for own, then, mean in zip(mine, self._brought, self._pending.shards, strict=True):
            moved = mean if left_out else torch.sub(own.to(accumulation_dtype(own.dtype)), then).add_(mean)
            own.copy_(moved)
        s.metrics.update(self._pending.metrics)
        self._pending, self._brought = None, []

    def memory_bytes(self, m: ModelLayout) -> float:
        return 2 * m.own_elements()

    def comm_ops(self, m: ModelLayout) -> list[CommOp]:
        return [overlapped(x, self.steps) for x in comm_ops(self.inner, m)]

    def state_dict(self) -> State:
        """Wait for the pending average; return what `PendingAverage` has, the models w_t and result w̄_t."""
        pending = self._pending
        if pending is None:
            return State(replicated={"due": None, "metrics": {}, "left_out": ()})
        pending.wait()
        vectors = {"brought": self._brought, "left": pending.shards}
        sharded = {name: named for name, named in vectors.items() if named}
        replicated = {"due": pending.due, "metrics": pending.metrics, "left_out": pending.left_out}
        return State(replicated=replicated, sharded=sharded)

    def load_state_dict(self, state: State) -> None:
        if self._pending is not None:
            self._pending.wait()
        same, left = state.replicated, state.sharded.get("left", [])
        due, metrics, left_out = same["due"], same["metrics"], tuple(same["left_out"])
        self._pending = None if due is None else PendingAverage(due, left, metrics, left_out)
        self._brought = state.sharded.get("brought", [])


def require_vectors_only(name: str, method: Method) -> None:
    """Raise `UserError` if `method` cannot average in the background, on copies of a rank's shards.

    `name` is the method that was to wrap it, `delayed` or `streaming`.
    """
    if not method.averager.traits.vectors_only:
        raise UserError(
            f"{name}: this method needs more than a rank's shards to average. Expected one of "
            f"{', '.join(sorted(DELAYABLE))}, with keep_state and with averaged parameters"
        )
    if method.schedule.traits.rate == 0:
        raise UserError(f"{name}: groups of this method never average their models; use it alone")


@method(cite=PAPER)
@checked
def delayed(method: Method, sync_delay: int) -> Method:
    """Return `method` with averages in the background: groups use each result `sync_delay` updates later.

    What groups learn in between is kept: w ← w̄ + (w − w_t), where w_t is the model that was sent and w̄ the
    result. So a synchronization delays no step if it takes no longer than `sync_delay` steps.

    Args:
        method: Method whose averager needs only the shards that a rank owns. `hierarchical` and `diloco` with
            `keep_state` are examples; the error for others lists all that can be delayed. In a job file:
            ``method = { name = "hierarchical", sync_every = 8 }``.
        sync_delay: Updates d between the beginning of a synchronization and the use of its result, from 0 to
            the steps between two synchronizations. 0 is `method` itself. If the schedule is not known in
            advance, a synchronization that falls due while an average is pending is skipped.

    Returns:
        A `Method` for `DistributedOptimizer`. Use one instance per optimizer: it holds state.

    Raises:
        UserError: If `method` is of another kind, or `sync_delay` is outside these bounds.

    Shape:
        M parameters in total; each rank owns M/K of them. While an average is pending, a rank keeps w_t and
        w̄, M/K elements each.

    Note:
        When a result is used, `optimizer.metrics` gets the metrics of that synchronization; `distance` is
        that of w_t.

        An evaluation does not include a pending average. If groups average by a plain mean, that changes
        nothing. With an outer optimizer, the evaluated model lacks its last outer step.

    Example:
        >>> method = hpcsgd.delayed(hpcsgd.hierarchical(sync_every=4), sync_delay=2)
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> train(optimizer, steps=4)
        >>> "distance" in optimizer.metrics     # begun, after step 4
        False
        >>> train(optimizer, steps=2)
        >>> optimizer.metrics["distance"] > 0
        True

    References:
        Q. Zhou et al.: DaSGD: Squeezing SGD Parallelization Performance in Distributed Training Using Delayed
        Averaging, 2020 (arXiv:2006.00441), for averages that come late.

    See Also:
        `streaming`: averages fragments in turn, and may drop what groups learn in between.
        `osgp`: gossip with late messages.
    """
    require_vectors_only("delayed", method)
    if type(sync_delay) is not int or sync_delay < 0:
        raise UserError(
            f"sync_delay = {sync_delay!r}: expected a number of steps ≥ 0",
            key="sync_delay",
            value=sync_delay,
        )
    period = method.schedule.traits.period
    if period is not None and sync_delay > period:
        raise UserError(
            f"sync_delay = {sync_delay}: expected 0 to {period}, the steps between synchronizations",
            key="sync_delay",
            value=sync_delay,
        )
    if sync_delay == 0:
        return method
    return replace(method, averager=Delayed(method.averager, sync_delay))
