"""The mean of the groups' models: w̄ = (1/P) Σ_i w_i (eq. 2 of the hierarchical local SGD paper)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from hpcsgd.comm import Work
from hpcsgd.core.averager import Traits, run_averager
from hpcsgd.core.method import HoldsModel
from hpcsgd.core.step import StepContext
from hpcsgd.core.traffic import CommOp, ModelLayout, allreduce
from hpcsgd.core.waits import All

AT_ONCE = 4
"""The largest number of buckets that are averaged at the same time.

Four buckets keep the links busy. More would cost memory, because `WithDistance` keeps a copy of each bucket
that is being averaged.
"""


@dataclass(frozen=True)
class Mean:
    """The averager in which each rank allreduces its own shards, M/K elements, over the P groups."""

    traits = Traits(All(), reads_gradients=False, leaves_mean=True, mean_of="models", vectors_only=True)

    def average(self, vectors: Iterable[Tensor], s: StepContext) -> Iterator[Tensor]:
        return pipelined(vectors, s, lambda w: s.topology.inter_group.allreduce(w, "mean"))

    def set_reference(self, common: Sequence[Tensor]) -> None:
        """Do nothing, because shards are sent unchanged, not as differences from a reference."""

    def comm_ops(self, m: ModelLayout) -> Iterator[CommOp]:
        """Yield the allreduces of a synchronization, whose time is T1 in eq. 7 of the paper."""
        for i, b in enumerate(m.buckets):
            yield replace(allreduce("inter_group", b.nbytes / m.K), bucket=i)


@dataclass(frozen=True)
class MeanOfAll:
    """The averager in which each rank allreduces the whole model, M elements: the paper's baseline."""

    traits = Traits(All(), whole_model=True, reads_gradients=False, leaves_mean=True, mean_of="models")

    def average(self, vectors: Iterable[Tensor], s: StepContext) -> list[Tensor]:
        found = list(vectors)
        s.agreement().wait()
        for work in [s.topology.inter_group.allreduce(w, "mean") for w in found]:
            work.wait()
        return found

    def comm_ops(self, m: ModelLayout) -> Iterator[CommOp]:
        """Return the allreduces of a synchronization: one of each bucket, whole, over the groups."""
        return (allreduce("inter_group", m.here(b)) for b in m.buckets)


def pipelined(vectors: Iterable[Tensor], s: StepContext, start: Callable[[Tensor], Work]) -> Iterator[Tensor]:
    """Call `start` on each vector to begin an operation over the groups; yield vectors that are done.

    At most `AT_ONCE` operations are under way. Raises `UserError` before it yields the first vector, unless
    all groups take part in this synchronization.
    """
    under_way: deque[tuple[Tensor, Work]] = deque()
    agreed = s.agreement()

    def arrived() -> Tensor:
        agreed.wait()
        w, work = under_way.popleft()
        work.wait()
        return w

    rest = iter(vectors)
    while True:
        if len(under_way) == AT_ONCE:
            yield arrived()
        if (w := next(rest, None)) is None:
            break
        under_way.append((w, start(w)))
    while under_way:
        yield arrived()


def set_to_average(vectors: Sequence[Tensor], s: StepContext, central: HoldsModel | None) -> None:
    """Set this rank's shards, `vectors`, to the model that `central` holds, or to the groups' mean.

    The mean is used if `central` is None or does not hold a model yet.
    """
    model = None if central is None else central.model()
    if model is None:
        run_averager(Mean(), vectors, s)
    else:
        for own, chunk in zip(vectors, model, strict=True):
            own.copy_(chunk)
