"""The distance metric of a synchronization, D = (1/P) Σ_i ‖W_i − W̄‖₂.

D is eq. 9 of the hierarchical local SGD paper and measures how far the groups' models differ. W_i is the
model of group i, and W̄ the mean of the groups' models. At a synchronization D is computed from the model of
each group before and after it. So D is exact for any averager that leaves all groups with W̄. Other methods
have a D only at evaluations, for which the mean is made temporarily.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from hpcsgd.comm import phase
from hpcsgd.core.averager import Averager, Traits
from hpcsgd.core.norm import squared_norm, sum_on_host
from hpcsgd.core.optional import comm_ops
from hpcsgd.core.step import StepContext
from hpcsgd.core.traffic import FLOAT64, CommOp, ModelLayout, allreduce


def distance(s: StepContext, mine: Sequence[Tensor], mean: Sequence[Tensor], shards: bool) -> float:
    """Return D from this group's vectors (`mine`) and the means of such vectors over the groups (`mean`).

    `shards` is True if the vectors are the shards of this rank, and False if they are the whole model.
    Collective; sends 8 bytes across groups and, for shards, 8 bytes in the group.
    """
    squared = sum_on_host(squared_norm(w - mean_w) for w, mean_w in zip(mine, mean, strict=True))
    return _of_squared(s, squared, shards, s.topology.num_groups)


def _of_squared(s: StepContext, squared: Tensor, shards: bool, count: int) -> float:
    """Return D as the mean over `count` groups; other groups pass 0 as `squared`."""
    with phase("distance"):
        if shards:
            s.topology.intra_group.allreduce(squared).wait()
        D = squared.sqrt()
        s.topology.inter_group.allreduce(D).wait()
    return D.item() / count


@dataclass(frozen=True)
class WithDistance:
    """The averager `inner`, after which the distance D is stored in `s.metrics["distance"]`.

    D is the mean over the groups that `inner` did not leave out; 0 if it left all of them out.
    """

    inner: Averager

    @property
    def traits(self) -> Traits:
        return self.inner.traits

    def average(self, vectors: Iterable[Tensor], s: StepContext) -> Iterator[Tensor]:
        brought: deque[Tensor] = deque()
        apart: list[Tensor] = []

        def noted() -> Iterator[Tensor]:
            for w in vectors:
                brought.append(w.clone())
                yield w

        for w in self.inner.average(noted(), s):
            yield w
            apart.append(squared_norm(brought.popleft().sub_(w)))  # while other buckets are averaged
        squared = sum_on_host(apart)
        if left_out := s.topology.group_index in s.left_out:
            squared.zero_()
        s.squared_distance = squared.item()
        if not left_out:
            squared.add_(s.squared_elsewhere)
        count = max(s.topology.num_groups - len(s.left_out), 1)
        s.metrics["distance"] = _of_squared(s, squared, self._of_shards(s.sharded), count)

    def _of_shards(self, sharded: bool) -> bool:
        """Return whether a rank holds only a part of its group's model."""
        return sharded or not self.traits.whole_model

    def comm_ops(self, m: ModelLayout) -> Iterator[CommOp]:
        yield from comm_ops(self.inner, m)
        if self._of_shards(m.sharded):
            yield allreduce("intra_group", FLOAT64, "distance")
        yield allreduce("inter_group", FLOAT64, "distance")
