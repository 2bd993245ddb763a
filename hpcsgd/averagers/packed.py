"""The mean of the groups' models by a narrow wire: groups send how they moved since the last meeting.

With θ, what all groups left the last meeting with, or began with, and e_i, what rounding has lost of what
group i had to say, position by position and chunk by chunk,

    x_i ← (w_i − θ) + e_i
    θ ← θ + unpacked, packed mean over the groups of unpacked, packed x_i
    w_i ← θ

and e_i is what rounding lost this time (see `hpcsgd.wires.mean`), where the wire keeps it. Weights themselves
would lose far more: a block of them is of one size, while what moved is as small as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from torch import Tensor

from hpcsgd.averagers.mean import Mean
from hpcsgd.core.method import State
from hpcsgd.core.step import Averager, Step
from hpcsgd.core.traffic import Message, Sizes
from hpcsgd.transport import wide
from hpcsgd.wires.base import Wire, throw
from hpcsgd.wires.mean import mean_on_all, padded, sent_by_mean


class PackedMean:
    """Each position averages the chunk that it owns by way of `wire`: an all-to-all and an allgather over the
    P groups. Where it is new to groups that have trained apart, a first meeting is one of `Mean`: from then
    on they have something in common.

    Takes room for two chunks, M/K elements each; one where the wire does not keep what it loses.
    """

    shards = True
    leaves_mean = True
    regardless_of_gradients = True
    of_chunks = True

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self._meetings = 0
        self._theta: list[Tensor] = []
        self._kept: list[Tensor] = []

    def before_update(self, s: Step) -> None:
        if s.t == 1 and s.job.P > 1 and not self._theta:  # all groups begin with the same model
            self._begin(s.owned)

    def __call__(self, s: Step) -> None:
        if not self._theta:
            Mean()(s)
            self._begin(s.owned)
        else:
            s.agreement().wait()
            for i, own in enumerate(s.owned):
                if own.numel():  # of a fragment a position may own nothing
                    own.copy_(self._mean(s, i, own))
            self.refer_to(s.owned)
        self._meetings += 1

    def refer_to(self, common: Sequence[Tensor]) -> None:
        for theta, chunk in zip(self._theta, common, strict=True):
            theta.copy_(chunk)

    def holds(self, m: Sizes) -> float:
        return (2 if self.wire.keeps else 1) * m.owned(wide=True)

    def sends(self, m: Sizes) -> Iterator[Message]:
        """Of every meeting, but for a first one of groups that have trained apart."""
        for b in m.buckets:
            yield from sent_by_mean(self.wire, m.chunk(b), m)

    def state_dict(self) -> State:
        kept = {"theta": self._theta, "kept": self._kept}
        chunks = {name: [x.clone() for x in vectors] for name, vectors in kept.items()}
        state: State = {"same": {"meetings": self._meetings}}
        return {**state, "chunks": {k: v for k, v in chunks.items() if v}} if self._theta else state

    def load_state_dict(self, state: State) -> None:
        """Without chunks the next meeting is a first one."""
        self._meetings = state["same"]["meetings"]
        chunks = state.get("chunks", {})
        self._theta = [x.clone() for x in chunks.get("theta", [])]
        self._kept = [x.clone() for x in chunks.get("kept", [])]

    def _begin(self, common: Sequence[Tensor]) -> None:
        self._theta = [x.to(wide(x.dtype), copy=True) for x in common]
        self._kept = [x.new_zeros(x.shape) for x in self._theta] if self.wire.keeps else []

    def _mean(self, s: Step, i: int, own: Tensor) -> Tensor:
        theta, n = self._theta[i], own.numel()
        x = padded(own.to(theta.dtype) - theta, s.job.P)
        if self._kept:
            x[:n] += self._kept[i]
        moved = mean_on_all(x, s.job.cross, self.wire, partial(throw, s.job.rank, self._meetings, i, 3))
        if self._kept:
            self._kept[i].copy_(x[:n])
        return theta + moved[:n]


def mean_by(wire: Wire | None) -> Averager:
    """The mean of the groups' chunks, which travel so; None: as they are."""
    return Mean() if wire is None else PackedMean(wire)
