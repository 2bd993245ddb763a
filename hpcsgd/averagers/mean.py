"""The mean of the groups' models: w̄ = (1/P) Σ_i w_i (eq. 2 of the hierarchical local SGD paper)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hpcsgd.core.capabilities import BeforeBucket, all_of, nothing
from hpcsgd.core.flat import Bucket
from hpcsgd.core.method import Central
from hpcsgd.core.step import Step
from hpcsgd.core.traffic import Message, Sizes, allreduce
from hpcsgd.transport import Work

AT_ONCE = 4
"""Buckets on their way: enough that the links never wait, and few, since who compares what a group brings
with what it gets keeps copies of them."""


@dataclass(frozen=True)
class Mean:
    """Each position averages the chunk it owns: an allreduce of M/K over the P groups, times 1/P."""

    shards = True
    leaves_mean = True
    regardless_of_gradients = True
    of_chunks = True

    def before_update(self, s: Step) -> None:
        pass

    def __call__(self, s: Step) -> None:
        all_of(self.one_by_one(s, nothing))

    def one_by_one(self, s: Step, before: BeforeBucket) -> Iterator[Bucket]:
        under_way: deque[tuple[Bucket, Work]] = deque()
        agreed = s.agreement()
        for b in s.buckets:
            if len(under_way) == AT_ONCE:
                agreed.wait()
                yield _arrived(under_way)
            before(b)
            under_way.append((b, s.job.cross.allreduce(b.own, "mean")))
        agreed.wait()
        while under_way:
            yield _arrived(under_way)

    def sends(self, m: Sizes) -> Iterator[Message]:
        """T1 of eq. 7."""
        for i, b in enumerate(m.buckets):
            yield replace(allreduce("cross", b.nbytes / m.K), bucket=i)


@dataclass(frozen=True)
class MeanOfAll:
    """Each position averages all of w: an allreduce of M over the P groups. The paper's baseline."""

    shards = False
    leaves_mean = True
    regardless_of_gradients = True

    def before_update(self, s: Step) -> None:
        pass

    def __call__(self, s: Step) -> None:
        s.agreement().wait()
        for work in [s.job.cross.allreduce(b.w, "mean") for b in s.buckets]:
            work.wait()

    def sends(self, m: Sizes) -> Iterator[Message]:
        """The second term of eq. 5."""
        return (allreduce("cross", m.here(b)) for b in m.buckets)


def _arrived(under_way: deque[tuple[Bucket, Work]]) -> Bucket:
    """The first one, once it has."""
    b, work = under_way.popleft()
    work.wait()
    return b


def agree(s: Step, central: Central | None) -> None:
    """The own chunks become those of the model that all groups train: what `central` keeps, or their mean."""
    model = None if central is None else central.model()
    if model is None:
        Mean()(s)
    else:
        for own, chunk in zip(s.owned, model, strict=True):
            own.copy_(chunk)
