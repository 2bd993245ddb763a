"""Delayed averaging: groups train on while their models meet, and take the mean in some steps later.

A meeting begins with w_t, the models after update t, and arrives d updates later:

    w̄_t = what the averager makes of w_t                 while updates t+1 … t+d are made
    w ← w̄_t + (w_{t+d} − w_t)                            after update t+d

so that no update is lost. With d = 0 it is the method itself. One meeting is under way at a
time: of two, the later one would take away once more by how far groups are apart.

That averages may come late is from Q. Zhou et al.: DaSGD: Squeezing SGD Parallelization Performance in
Distributed Training Using Delayed Averaging, 2020 (arXiv:2006.00441); the form above is the
simplest that goes with any optimizer and averager. DASO (Heat) weighs the two models by steps instead.
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
    """`inner`, whose meetings arrive `steps` ≥ 1 updates after they began.

    Called where none arrives it makes groups meet at once, after it has taken in what is under way. D is that
    of w_t, noted at the arrival.
    """

    def __init__(self, inner: Averager, steps: int) -> None:
        self.inner = inner
        self.steps = steps
        waits = later(inner.traits.waits, steps)
        self.traits = replace(inner.traits, waits=waits, leaves_mean=False, vectors_only=False)
        self._pending: PendingAverage | None = None
        self._brought: list[Tensor] = []
        """The w_t of the meeting under way."""
        self._wanted = 0
        """The last update after which groups were to meet."""
        self._on_own_thread: Topology | None = None

    def is_due(self, s: StepContext, wanted: bool) -> bool:
        """Whether a meeting arrives after this update. One that is `wanted` begins then, if none is under way
        any more."""
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
        """w ← w̄_t + (w − w_t), if a meeting is under way, for which it waits."""
        if self._pending is None:
            return
        self._pending.wait()
        # Where there was one group in between, the vectors were dropped.
        mine: Sequence[Tensor] = vectors if self._brought else ()
        for own, then, mean in zip(mine, self._brought, self._pending.shards, strict=True):
            own.copy_(torch.sub(own.to(accumulation_dtype(own.dtype)), then).add_(mean))
        s.metrics.update(self._pending.notes)
        self._pending, self._brought = None, []

    def memory_bytes(self, m: ModelLayout) -> float:
        return 2 * m.own_elements()

    def comm_ops(self, m: ModelLayout) -> list[CommOp]:
        return [overlapped(x, self.steps) for x in comm_ops(self.inner, m)]

    def state_dict(self) -> State:
        """With w_t and w̄_t of the meeting under way, which it waits for."""
        meeting = self._pending
        if meeting is None:
            return State(replicated={"due": None, "notes": {}})
        meeting.wait()
        vectors = {"brought": self._brought, "left": meeting.shards}
        sharded = {name: named for name, named in vectors.items() if named}
        return State(replicated={"due": meeting.due, "notes": meeting.notes}, sharded=sharded)

    def load_state_dict(self, state: State) -> None:
        if self._pending is not None:
            self._pending.wait()
        due, left = state.replicated["due"], state.sharded.get("left", [])
        self._pending = None if due is None else PendingAverage(due, left, state.replicated["notes"])
        self._brought = state.sharded.get("brought", [])


def require_vectors_only(name: str, method: Method) -> None:
    """Raises `UserError` where its averager cannot be given copies while groups train on."""
    if not method.averager.traits.vectors_only:
        raise UserError(
            f"{name}: meetings of this method need more than the chunks that a position owns; those of "
            f"{', '.join(sorted(DELAYABLE))} do not, with moments kept and parameters averaged"
        )
    if method.schedule.traits.rate == 0:
        raise UserError(f"{name}: groups of this method never meet; use it alone")


@method(cite=PAPER)
@checked
def delayed(method: Method, sync_delay: int) -> Method:
    """`method`, whose groups train on while they meet: the result is taken in `steps` updates later.

    What groups learned meanwhile stays: w ← w̄ + (w − w_t), where w_t are the models that met and w̄ is what
    came of it. So a meeting costs no time if it takes no longer than so many steps. A rank keeps w_t and w̄,
    M/K elements each. Noted at the arrival: what the method notes of a meeting, `distance` being that of w_t.
    What is still under way at an evaluation is not in the model: with a mean that changes nothing, with an
    outer optimizer its last step is to come.

    Not to be confused with `osgp`, gossip whose messages are late, nor with `streaming`, where parts of the
    model meet in turn and what groups learned meanwhile may be dropped.

    Args:
        method: whose meetings go by the chunks that a position owns and nothing else, as those of
            `hierarchical` and `diloco` do with moments kept. Others are refused, with a list of those that
            can be delayed. In a job file ``method = { name = "hierarchical", sync_every = 8 }``.
        sync_delay: d, updates between the beginning of a meeting and its arrival, 0 or more; 0 is `method`
            itself. At most the steps from one meeting to the next. Where that cannot be told before, a
            meeting that falls due while one is under way is left out.

    Raises:
        UserError: for other methods, and for more steps than there are between meetings.

    Example:
        >>> method = hpcsgd.delayed(hpcsgd.hierarchical(sync_every=4), sync_delay=2)
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> train(optimizer, steps=4)
        >>> "distance" in optimizer.metrics     # begun, after step 4
        False
        >>> train(optimizer, steps=2)
        >>> optimizer.metrics["distance"] > 0
        True

    Source:
        Q. Zhou et al.: DaSGD: Squeezing SGD Parallelization Performance in Distributed Training Using Delayed
        Averaging, 2020 (arXiv:2006.00441), for averages that come late.
    """
    require_vectors_only("delayed", method)
    if type(sync_delay) is not int or sync_delay < 0:
        raise UserError(
            f"sync_delay = {sync_delay!r}: a meeting arrives 0 or more steps after it began",
            key="sync_delay",
            value=sync_delay,
        )
    period = method.schedule.traits.period
    if period is not None and sync_delay > period:
        raise UserError(
            f"sync_delay = {sync_delay}: expected 0 to {period}, the steps from one meeting to the next",
            key="sync_delay",
            value=sync_delay,
        )
    if sync_delay == 0:
        return method
    return replace(method, averager=Delayed(method.averager, sync_delay))
