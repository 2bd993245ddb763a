"""The quantized mean of the groups' models: groups send how they moved since the last synchronization.

θ is the groups' common model after the last synchronization, or at the beginning, and w_i the model of group
i. e_i is the part of group i's movement that quantization has lost so far. Q(x) is x after it was quantized
and decoded. For every rank and shard,

    x_i ← (w_i − θ) + e_i
    θ ← θ + Q((1/P) Σ_i Q(x_i))
    w_i ← θ

and e_i becomes what quantization loses this time (see `hpcsgd.parts.quantizers.mean`), if the quantizer keeps
its errors. Quantizing the weights themselves would lose far more, because the elements of a block share a
scale, and movements are much smaller than weights.
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
    """The averager in which ranks average their shards over the groups in the format `wire`.

    This takes an all-to-all and an allgather over the P groups. If groups may have different models before
    the first synchronization, that one is a plain `Mean`, which gives them a common model θ. A rank keeps θ
    and, if the quantizer keeps its errors, e_i: M/K elements each.
    """

    traits = Traits(All(), reads_gradients=False, leaves_mean=True, mean_of="models", vectors_only=True)

    def __init__(self, wire: Quantizer) -> None:
        self.wire = wire
        self._num_syncs = 0
        self._theta: list[Tensor] = []
        self._kept: list[Tensor] = []

    def prepare(self, vectors: Sequence[Tensor], s: StepContext) -> None:
        if s.t == 1 and s.topology.num_groups > 1 and not self._theta:  # all groups have the initial model
            self._begin(vectors)

    def average(self, vectors: Iterable[Tensor], s: StepContext) -> list[Tensor]:
        if not self._theta:
            found = run_averager(Mean(), vectors, s)
            self._begin(found)
        else:
            found = list(vectors)
            s.agreement().wait()
            for i, own in enumerate(found):
                if own.numel():  # a rank may own nothing of a fragment
                    own.copy_(self._mean(s, i, own))
            self.set_reference(found)
        self._num_syncs += 1
        return found

    def set_reference(self, common: Sequence[Tensor]) -> None:
        """Set the reference θ to `common`, the model from which all groups train on."""
        for theta, chunk in zip(self._theta, common, strict=True):
            theta.copy_(chunk)

    def memory_bytes(self, m: ModelLayout) -> float:
        return (2 if self.wire.keeps else 1) * m.own_elements(wide=True)

    def comm_ops(self, m: ModelLayout) -> Iterator[CommOp]:
        """Yield the operations of a quantized synchronization, which is every one except maybe the first."""
        for b in m.buckets:
            yield from sent_by_mean(self.wire, m.shard(b), m)

    def state_dict(self) -> State:
        vectors = {"theta": self._theta, "kept": self._kept}
        sharded = {name: found for name, found in vectors.items() if found}
        return State(replicated={"num_syncs": self._num_syncs}, sharded=sharded)

    def load_state_dict(self, state: State) -> None:
        """Load the state; if it has no vectors, the next synchronization is treated as the first."""
        self._num_syncs = state.replicated["num_syncs"]
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
    """Return the averager that sends shards in the format `wire`, or in their own dtype if `wire` is None."""
    return Mean() if wire is None else QuantizedMean(wire)
