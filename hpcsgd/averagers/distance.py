"""The distance metric of a meeting: D = (1/P) Σ_i ‖W_i − W̄‖₂ (eq. 9 of the hierarchical local SGD paper).

D counts how far the groups have walked apart; at a meeting it is computed from what each group brought and
what it left with, so it is exact for any averager that leaves all groups with W̄. Methods that never meet so
have a D at evaluations, where the mean is made for a while.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from hpcsgd.core.capabilities import (
    BeforeBucket,
    all_of,
    is_regardless_of_gradients,
    leaves_mean,
    nothing,
    of_chunks,
    one_by_one,
)
from hpcsgd.core.flat import Bucket
from hpcsgd.core.norm import squared_norm, sum_on_host
from hpcsgd.core.step import Averager, Step
from hpcsgd.core.traffic import FLOAT64, Message, Sizes, allreduce, sends
from hpcsgd.transport import phase


def distance(s: Step, mine: Sequence[Tensor], mean: Sequence[Tensor], shards: bool) -> float:
    """D, of this group's vectors and the means of all groups'; `shards`: they are this position's chunks.

    Collective; 8 bytes over the group, 8 over the groups.
    """
    squared = sum_on_host(squared_norm(w - mean_w) for w, mean_w in zip(mine, mean, strict=True))
    return _of_squared(s, squared, shards)


def _of_squared(s: Step, squared: Tensor, shards: bool) -> float:
    with phase("distance"):
        if shards:
            s.job.group.allreduce(squared).wait()
        D = squared.sqrt()
        s.job.cross.allreduce(D).wait()
    return D.item() / s.job.P


@dataclass
class Measured:
    """`inner`, with D noted in `s.notes["distance"]`."""

    inner: Averager
    squared: float | None = field(default=None, init=False, compare=False)
    beside: float = field(default=0.0, init=False, compare=False)

    @property
    def shards(self) -> bool:
        return self.inner.shards

    @property
    def leaves_mean(self) -> bool:
        return leaves_mean(self.inner)

    @property
    def regardless_of_gradients(self) -> bool:
        return is_regardless_of_gradients(self.inner)

    @property
    def of_chunks(self) -> bool:
        return of_chunks(self.inner)

    def before_update(self, s: Step) -> None:
        self.inner.before_update(s)

    def __call__(self, s: Step) -> None:
        all_of(self.one_by_one(s, nothing))

    def one_by_one(self, s: Step, before: BeforeBucket) -> Iterator[Bucket]:
        brought: dict[Bucket, Tensor] = {}
        apart: list[Tensor] = []

        def note(b: Bucket) -> None:
            before(b)
            brought[b] = self._vector(b).clone()

        for b in one_by_one(self.inner, s, note):
            yield b
            apart.append(squared_norm(brought.pop(b).sub_(self._vector(b))))  # while others are on their way
        squared = sum_on_host(apart)
        self.squared = squared.item()
        s.notes["distance"] = _of_squared(s, squared.add_(self.beside), self.shards or s.sharded)

    def _vector(self, b: Bucket) -> Tensor:
        return b.own if self.shards else b.w

    def sends(self, m: Sizes) -> Iterator[Message]:
        yield from sends(self.inner, m)
        if self.shards or m.sharded:
            yield allreduce("group", FLOAT64, "distance")
        yield allreduce("cross", FLOAT64, "distance")
