"""The mean of the groups' models by a narrow wire: groups send how they moved since the last meeting.

With θ, what all groups left the last meeting with, or began with, and e_i, what rounding has lost of what
group i had to say, position by position and chunk by chunk,

    x_i ← (w_i − θ) + e_i
    θ ← θ + unpacked, packed mean over the groups of unpacked, packed x_i
    w_i ← θ

and e_i is what rounding lost this time (see `hpcsgd.parts.quantizers.mean`), where the wire keeps it. Weights
themselves would lose far more: a block of them is of one size, while what moved is as small as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from torch import Tensor

from hpcsgd.comm import accumulation_dtype
from hpcsgd.core.averager import Traits, run_averager
from hpcsgd.core.state import State
from hpcsgd.core.step import StepContext
from hpcsgd.core.traffic import CommOp, ModelLayout
from hpcsgd.core.waits import All
from hpcsgd.parts.averagers.mean import Mean
from hpcsgd.parts.quantizers.base import Quantizer, noise_for
from hpcsgd.parts.quantizers.mean import mean_on_all, padded, sent_by_mean


class QuantizedMean:
    """Each position averages the chunk that it owns by way of `wire`: an all-to-all and an allgather over the
    P groups. Where it is new to groups that have trained apart, a first meeting is one of `Mean`: from then
    on they have something in common.

    Takes room for two chunks, M/K elements each; one where the wire does not keep what it loses.
    """

    traits = Traits(All(), reads_gradients=False, leaves_mean=True, vectors_only=True)

    def __init__(self, wire: Quantizer) -> None:
        self.wire = wire
        self._num_syncs = 0
        self._theta: list[Tensor] = []
        self._kept: list[Tensor] = []

    def prepare(self, vectors: Sequence[Tensor], s: StepContext) -> None:
        if s.t == 1 and s.topology.num_groups > 1 and not self._theta:  # all groups begin with the same model
            self._begin(vectors)

    def average(self, vectors: Iterable[Tensor], s: StepContext) -> list[Tensor]:
        if not self._theta:
            found = run_averager(Mean(), vectors, s)
            self._begin(found)
        else:
            found = list(vectors)
            s.agreement().wait()
            for i, own in enumerate(found):
                if own.numel():  # of a fragment a position may own nothing
                    own.copy_(self._mean(s, i, own))
            self.set_reference(found)
        self._num_syncs += 1
        return found

    def set_reference(self, common: Sequence[Tensor]) -> None:
        """Count movement from `common` on: all groups have moved on to it from what this left, alike."""
        for theta, chunk in zip(self._theta, common, strict=True):
            theta.copy_(chunk)

    def memory_bytes(self, m: ModelLayout) -> float:
        return (2 if self.wire.keeps else 1) * m.own_elements(wide=True)

    def comm_ops(self, m: ModelLayout) -> Iterator[CommOp]:
        """Of every meeting, but for a first one of groups that have trained apart."""
        for b in m.buckets:
            yield from sent_by_mean(self.wire, m.shard(b), m)

    def state_dict(self) -> State:
        vectors = {"theta": self._theta, "kept": self._kept}
        sharded = {name: found for name, found in vectors.items() if found}
        return State(replicated={"meetings": self._num_syncs}, sharded=sharded)

    def load_state_dict(self, state: State) -> None:
        """Without vectors the next meeting is a first one."""
        self._num_syncs = state.replicated["meetings"]
        self._theta, self._kept = (state.sharded.get(name, []) for name in ("theta", "kept"))

    def _begin(self, common: Sequence[Tensor]) -> None:
        self._theta = [x.to(accumulation_dtype(x.dtype), copy=True) for x in common]
        self._kept = [x.new_zeros(x.shape) for x in self._theta] if self.wire.keeps else []

    def _mean(self, s: StepContext, i: int, own: Tensor) -> Tensor:
        theta, n = self._theta[i], own.numel()
        x = padded(own.to(theta.dtype) - theta, s.topology.num_groups)
        if self._kept:
            x[:n] += self._kept[i]
        moved = mean_on_all(
            x, s.topology.inter_group, self.wire, partial(noise_for, s.topology.rank, self._num_syncs, i, 3)
        )
        if self._kept:
            self._kept[i].copy_(x[:n])
        return theta + moved[:n]


def mean_by(wire: Quantizer | None) -> Mean | QuantizedMean:
    """The mean of the groups' chunks, which travel so; None: as they are."""
    return Mean() if wire is None else QuantizedMean(wire)
