"""Streaming DiLoCo: the groups average one fragment of the model after the other, while they train on.

A. Douillard et al.: Streaming DiLoCo with overlapping communication: Towards a Distributed Free Lunch, 2025
(arXiv:2501.18512), algorithm 2. Layers are divided among F fragments in strides. Fragment p is synchronized
every H steps at an offset of its own, so that the link is always in use. w_i,p is this fragment in the model
of group i, and θ_p is the common one:

    after update t     groups begin to compute θ_p ← OuterOpt(θ_p, θ_p − (1/P) Σ_i w_i,p)
    after update t+τ   each group uses the result: w_i,p ← α·w_i,p + (1 − α)·θ_p

With α = 0 a group drops the changes that it made to the fragment in between; with α = 1 it would ignore the
results. The paper's α is 1/2.

Differences from the paper:

- The paper's replica is a group here, and each rank contributes what it owns of a fragment.
- Layers of different sizes are divided evenly, see `hpcsgd.parts.averagers.fragments`.
- Any method with a fixed period I can be used; without an outer optimizer θ_p is the mean.
- The offsets of consecutive fragments differ by about I/F steps.
- Values are sent in their own dtype or in the format `quantize` of the inner method, not in the paper's E3M0.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from hpcsgd.arguments import checked
from hpcsgd.comm import accumulation_dtype
from hpcsgd.core.averager import Averager
from hpcsgd.core.method import Method, parts_of
from hpcsgd.core.optional import comm_ops, memory_bytes, prepare
from hpcsgd.core.state import State
from hpcsgd.core.step import StepContext
from hpcsgd.core.topology import Topology
from hpcsgd.core.traffic import BucketLayout, CommOp, ModelLayout, overlapped
from hpcsgd.core.waits import later
from hpcsgd.errors import UserError
from hpcsgd.methods.delayed import require_vectors_only
from hpcsgd.methods.registry import method
from hpcsgd.parts.averagers.fragment_sync import LEFT, FragmentSync
from hpcsgd.parts.averagers.fragments import fragments, put_together
from hpcsgd.parts.averagers.pending_average import PendingAverage, begin, on_own_thread, step_on_own_thread
from hpcsgd.parts.outer_schedules.base import require_rate
from hpcsgd.parts.schedules.every import InTurn

log = logging.getLogger(__name__)


class Streaming:
    """The averager that averages fragments in turn, each with its own copy of the averager `how`.

    `turn` says after which updates each fragment begins; `delay` is τ and `blend` α. If `average` is called
    when no result is due, groups first apply the pending averages and then average the whole model. The
    metric `distance` covers all fragments, each as of its last synchronization.
    """

    def __init__(self, how: Averager, turn: InTurn, delay: int, blend: float) -> None:
        self.how, self.turn, self.delay, self.blend = how, turn, delay, blend
        waits = later(how.traits.waits, delay)
        self.traits = replace(
            how.traits, waits=waits, reads_gradients=False, leaves_mean=False, mean_of="", vectors_only=False
        )
        self._streams: list[FragmentSync] = []
        self._shards: list[Tensor] = []
        self._saved = State()
        self._on_own_thread: Topology | None = None
        self._asked = -1
        """The last update after which `is_due` was called."""

    def prepare(self, vectors: Sequence[Tensor], s: StepContext) -> None:
        if s.topology.num_groups > 1 and not self._streams:
            self._start(list(vectors), s)

    def is_due(self, s: StepContext, wanted: bool) -> bool:
        """Return whether a fragment's result must be used after this update; without delay, `wanted`."""
        self._asked = s.t
        return any(self._pending(s.t)) if self.delay else wanted

    def begin(self, vectors: Sequence[Tensor], s: StepContext) -> None:
        """Begin to average the fragments that `turn` lists for this update; skip those still under way."""
        for p in self.turn.at(s.t):
            if self._streams[p].pending is None:
                self._begin(self._streams[p], vectors, s)

    def average(self, vectors: Iterable[Tensor], s: StepContext) -> list[Tensor]:
        found = list(vectors)
        asked, self._asked = self._asked == s.t, -1
        if asked and not self.delay:
            self.begin(found, s)
        arriving = list(self._pending(s.t)) if asked else []
        for stream in arriving or self._streams:
            self._take_in(stream, found, s)
        if not arriving:
            self._average(found, s)
        elif self.delay:
            self.begin(found, s)
        return found

    def finish(self, vectors: Sequence[Tensor], s: StepContext, due: bool) -> None:
        """Wait for the pending averages and blend them in. Without delay, first begin those that are due."""
        if due and not self.delay:
            self.begin(vectors, s)
        for stream in self._streams:
            self._take_in(stream, vectors, s)

    def memory_bytes(self, m: ModelLayout) -> float:
        """Return the bytes of pending averages and averagers; the fragments' averagers count as one."""
        I, F = self.turn.I, self.turn.F  # noqa: E741 - the papers' letter
        begun = [[(t + offset) % I for offset in self.turn.offsets] for t in range(I)]
        most = max(sum(steps_ago < self.delay for steps_ago in each) for each in begun)
        under_way = most / F * m.own_elements()
        return under_way + memory_bytes((part for _, part in parts_of("averager", self.how)), m)

    def comm_ops(self, m: ModelLayout) -> Iterator[CommOp]:
        """Yield the operations of a synchronization, which averages one fragment, about 1/F of the model.

        Each fragment's operations are counted 1/F times, so that the sum is the mean over the F fragments.
        They overlap F·τ steps, because only one fragment is averaged at a time.
        """
        F = self.turn.F
        for p in range(F):
            counts = [(b.used * (p + 1) // F - b.used * p // F, b.width) for b in m.buckets]
            part = replace(m, buckets=tuple(BucketLayout(n, n, width) for n, width in counts))
            for x in comm_ops(self.how, part):
                yield overlapped(replace(x, times=x.times / F), F * self.delay)

    def state_dict(self) -> State:
        """Wait for the pending averages, and return the state with their results."""
        if not self._streams:
            return self._saved
        found, rest = zip(*(stream.saved() for stream in self._streams), strict=True)
        chunks: dict[str, list[Tensor]] = {}
        for name in dict.fromkeys(name for vectors in found for name in vectors):
            having = zip(self._streams, found, strict=True)
            pieces = [(stream.fragment, vectors[name]) for stream, vectors in having if name in vectors]
            chunks[name] = put_together(self._shards, pieces)
        all_pending = [stream.pending for stream in self._streams]
        replicated = {
            "due": [None if pending is None else pending.due for pending in all_pending],
            "metrics": [{} if pending is None else dict(pending.metrics) for pending in all_pending],
            "left_out": [() if pending is None else pending.left_out for pending in all_pending],
            "names": [list(vectors) for vectors in found],
            "rest": list(rest),
        }
        distances = [stream.distance for stream in self._streams]
        return State(replicated=replicated, sharded=chunks, per_rank={"distances": distances})

    def load_state_dict(self, state: State) -> None:
        """Store `state`; `prepare` loads it into the fragments at the next step."""
        for stream in self._streams:
            if stream.pending is not None:
                stream.pending.wait()
        self._saved, self._streams = state, []

    def _start(self, owned: list[Tensor], s: StepContext) -> None:
        self._shards = owned
        cut = fragments(s.buckets, self.turn.F)
        self._streams = [FragmentSync(fragment, copy.deepcopy(self.how)) for fragment in cut]
        saved, self._saved = self._saved, State()
        if saved.replicated:
            self._go_on(saved, s)
        for stream in self._streams:
            prepare(stream.how, stream.fragment.of(owned), stream.step(s))

    def _go_on(self, saved: State, s: StepContext) -> None:
        """Continue from a saved state, with its pending averages if the number of fragments is the same.

        Otherwise these averages are dropped. Every fragment then gets the vectors that all saved fragments
        have, and the other state of the saved fragment with the fewest vectors.
        """
        same, chunks = saved.replicated, saved.sharded
        known = [{name for name in names if name != LEFT} for names in same["names"]]
        fewest = min(range(len(known)), key=lambda p: len(known[p]))
        if len(known) != len(self._streams):
            self._tell_dropped(s, set[str]().union(*known) - known[fewest])
            for stream in self._streams:
                stream.apply(stream.parts_of(known[fewest], chunks), same["rest"][fewest])
            return
        distances = saved.per_rank.get("distances", [None] * len(known))
        for p, stream in enumerate(self._streams):
            mine = stream.parts_of(same["names"][p], chunks)
            stream.apply(mine, same["rest"][p])
            if LEFT in mine:
                due, left_out = same["due"][p], tuple(same["left_out"][p])
                stream.pending = PendingAverage(due, mine[LEFT], dict(same["metrics"][p]), left_out)
            stream.distance = distances[p]

    def _tell_dropped(self, s: StepContext, unknown: Collection[str]) -> None:
        if s.topology.rank == 0:
            also = f", and {', '.join(sorted(unknown))}, which not all fragments had" if unknown else ""
            log.warning(
                "streaming: the number of fragments has changed: pending averages are dropped%s", also
            )

    def _pending(self, t: int) -> Iterator[FragmentSync]:
        return (stream for stream in self._streams if stream.pending is not None and stream.pending.due <= t)

    def _begin(self, stream: FragmentSync, owned: Sequence[Tensor], s: StepContext) -> None:
        if self._on_own_thread is None:
            self._on_own_thread = on_own_thread(s.topology)
        sync, mine = partial(stream.synchronize, others=self._beside(stream)), stream.step(s)
        stream.pending = begin(sync, mine, self._on_own_thread, stream.fragment.of(owned), s.t + self.delay)

    def _beside(self, stream: FragmentSync) -> list[FragmentSync]:
        return [other for other in self._streams if other is not stream]

    def _take_in(self, stream: FragmentSync, owned: Sequence[Tensor], s: StepContext) -> None:
        pending, stream.pending = stream.pending, None
        if pending is None:
            return
        pending.wait()
        left_out = s.topology.group_index in pending.left_out
        for own, theta in stream.fragment.parts(owned, pending.shards):
            x = theta.to(accumulation_dtype(theta.dtype))
            own.copy_(x if left_out else torch.lerp(x, own.to(x.dtype), self.blend))
        s.metrics.update(pending.metrics)

    def _average(self, owned: Sequence[Tensor], s: StepContext) -> None:
        for stream in self._streams:
            chunks = stream.fragment.of(owned)
            mine = stream.step(step_on_own_thread(s, s.topology))
            stream.synchronize(chunks, mine, self._beside(stream))
            for own, theta in stream.fragment.parts(owned, chunks):
                own.copy_(theta)
            s.metrics.update(mine.metrics)


@method(cite="douillard2025streaming")
@checked
def streaming(method: Method, num_fragments: int, sync_delay: int, update_alpha: float = 0.5) -> Method:
    """Return `method` with background synchronizations of one model fragment after the other.

    Each fragment is synchronized as often as `method` says, the F fragments in turn. In total a rank sends as
    much as `method` does, but in F smaller parts that are spread evenly over the steps. The result is blended
    into the model `sync_delay` steps later. With an outer optimizer, as in `diloco`, each fragment has its
    own θ and outer optimizer state.

    Args:
        method: Method with a fixed period I, whose averager needs only the shards that a rank owns.
            `hierarchical` and `diloco` with `keep_state` are examples; others are refused. In a job file:
            ``method = { name = "diloco", sync_every = 30 }``.
        num_fragments: Number of fragments F, 1 to I. Fragments have about the same size.
        sync_delay: Steps τ from the beginning of a synchronization to the use of its result, 0 to I.
        update_alpha: Weight α of the group's own values when the result is blended in, 0 ≤ α < 1. With 0 the
            result replaces the fragment and all changes made to it in between. Default 0.5, the paper's.

    Returns:
        A `Method` for `DistributedOptimizer`. Use one instance per optimizer: it holds state.

    Raises:
        UserError: If `method` is of another kind, an argument is outside these bounds, or the method's
            `outer_schedule` has a rate of 0 at the first synchronization of a fragment.

    Note:
        Once all fragments have been synchronized, `optimizer.metrics["distance"]` covers all of them, each as
        of its last synchronization.

    Example:
        >>> method = hpcsgd.streaming(hpcsgd.diloco(sync_every=4), num_fragments=2, sync_delay=1)
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> train(optimizer, steps=5)
        >>> optimizer.metrics["distance"] > 0     # of the second fragment after step 3, the first one after 5
        True

    References:
        A. Douillard et al.: Streaming DiLoCo with overlapping communication: Towards a Distributed Free
        Lunch, 2025 (arXiv:2501.18512), algorithm 2.

    See Also:
        `delayed`: averages the whole model at once and keeps what groups learn in between.
    """
    require_vectors_only("streaming", method)
    every = method.schedule.traits.period
    if every is None:
        raise UserError(
            "streaming: this method has no fixed number of steps between synchronizations; expected one that "
            "has, such as hierarchical or diloco. For others use delayed"
        )
    for name, value, low in (("num_fragments", num_fragments, 1), ("sync_delay", sync_delay, 0)):
        if type(value) is not int or not low <= value <= every:
            message = f"{name} = {value!r}: expected {low} to {every}, the steps between synchronizations"
            raise UserError(message, key=name, value=value)
    if not 0 <= update_alpha < 1:
        why = f"update_alpha = {update_alpha}: expected a number ≥ 0 and < 1; with 1 no result would be used"
        raise UserError(why, key="update_alpha", value=update_alpha)
    for _, part in parts_of("averager", method.averager):
        require_rate(getattr(part, "schedule", None), -(-every // num_fragments))
    turn = InTurn(every, num_fragments)
    return replace(
        method, schedule=turn, averager=Streaming(method.averager, turn, sync_delay, float(update_alpha))
    )
