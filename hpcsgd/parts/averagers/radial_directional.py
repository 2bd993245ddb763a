"""Radial-directional averaging: the mean direction of the groups' changes times the mean of their norms.

A. Douillard et al.: Decoupled DiLoCo, 2026 (arXiv:2604.21428), for the outer gradients of M learners. Here a
learner is a group. θ is the model after the last synchronization and w_m that of group m. For each tensor,
with φ(v) = v/‖v‖₂ and φ(0) = 0:

    v_m = w_m − θ
    r = (1/M) Σ_m ‖v_m‖
    d = (1/M) Σ_m φ(v_m)
    v = r·φ(d)                or (1/M) Σ_m v_m if ‖d‖ < ε, when the directions cancel
    v = (1/M) Σ_m v_m         for embeddings and for tensors of fewer than two dimensions
    w_m ← θ + v               for every group m

The changes of the groups are nearly orthogonal. The norm of their mean is then that of one change over √M, so
the rate of an outer optimizer would have to grow with M. The norm of v does not depend on M.

Differences from the paper, of which we read two implementations by others:

- The paper prints the mean of v_m as radial factor, which is a vector. Both implementations take the mean of
  the norms.
- All groups have the weight 1, as in the plain mean. The paper weighs learners by their tokens; in
  `ensemble_sync` groups are weighted so with `tokens_per_step`.
- ε is 10⁻¹² for float64, as in the implementations, and 1.2·10⁻⁷ for float32, which rounds sums of
  directions by that much. If changes are small compared with θ, rounding of the models leaves more of
  directions that cancel.
- The paper takes the plain mean for the fragment of the embeddings. Zeros spoil norms and directions: most
  rows of an embedding do not change. Tensors of one dimension, such as biases, are our addition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from hpcsgd.arguments import checked
from hpcsgd.comm import accumulation_dtype, phase
from hpcsgd.core.averager import Traits, run_averager
from hpcsgd.core.slot import Slot
from hpcsgd.core.state import State
from hpcsgd.core.step import StepContext
from hpcsgd.core.traffic import FLOAT64, CommOp, ModelLayout, allreduce
from hpcsgd.core.waits import All
from hpcsgd.errors import UserError
from hpcsgd.parts.averagers.by_tensor import ByTensor
from hpcsgd.parts.averagers.mean import Mean

PHASE = "merge"
CANCELLED = 1e-12
"""The norm ε of a mean direction below which directions cancel, for float64."""


@checked
@dataclass(frozen=True)
class RadialDirectional:
    """Radial-directional averaging: tensors move by their mean norm in their mean direction.

    Use it as `merge` of `diloco`, alone or inside `delayed` or `streaming`, or of `ensemble_sync` with
    `outer`. The gradient of the outer optimizer then has about the same norm for any number of groups.

    Embeddings, and tensors of fewer than two dimensions, take the plain mean. Embeddings are the weights of
    `torch.nn.Embedding` and `torch.nn.EmbeddingBag`, and output layers that share them.

    Args:
        plain_mean: Names of further parameters that take the plain mean, such as "wpe" or "*.router.*".
            Name embeddings here that the model makes without those modules. Default (), which is none.

    Raises:
        UserError: At the first step, if no trainable parameter of the model has such a name.

    Shape:
        The model has T tensors. A synchronization has two more allreduces of 8·T bytes in the group, and one
        of 16·T bytes over the groups. With 16-bit parameters, changes travel in float32. A rank keeps θ, the
        model after the last synchronization: M/K elements. In `ensemble_sync` it keeps nothing, and the
        average over the groups has 8·T bytes more.

    Note:
        `optimizer.metrics["distance"]` is then the distance of the groups' models from the merged one, not
        from their mean.

    Example:
        >>> method = hpcsgd.diloco(sync_every=2, merge=hpcsgd.RadialDirectional())
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> train(optimizer, steps=2)
        >>> optimizer.metrics["distance"] > 0
        True

    References:
        A. Douillard et al.: Decoupled DiLoCo for Resilient Distributed Pre-training, 2026 (arXiv:2604.21428),
        for radial-directional averaging.

    See Also:
        `PseudoGradientPenalty`: a mean without the groups whose changes are outliers.
    """

    plain_mean: str | Sequence[str] = ()


MERGES: Mapping[str, Callable[..., RadialDirectional]] = {"radial_directional": RadialDirectional}
"""The ways to merge the groups' changes, by their names in job files."""


class RadialDirectionalMean:
    """The averager that sets all groups to θ + v, where `merge` says which tensors take the plain mean.

    If groups may have different models before the first synchronization, that one is a plain `Mean`, which
    gives them a common model θ.
    """

    traits = Traits(All(), reads_gradients=False, vectors_only=True)

    def __init__(self, merge: RadialDirectional) -> None:
        self.merge = merge
        self._theta: list[Tensor] = []

    def prepare(self, vectors: Sequence[Tensor], s: StepContext) -> None:
        if s.t == 1:
            plain_tensors(self.merge, ByTensor.of_shards(s.buckets), s)  # raises an error for a wrong name
        if s.t == 1 and s.topology.num_groups > 1 and not self._theta:  # all groups have the initial model
            self._theta = [w.clone() for w in vectors]

    def average(self, vectors: Iterable[Tensor], s: StepContext) -> list[Tensor]:
        found = list(vectors)
        if not self._theta:
            run_averager(Mean(), found, s)
            self._theta = [w.clone() for w in found]
            return found
        s.agreement().wait()
        tensors = ByTensor.of_shards(s.buckets, s.cuts)
        plain = plain_tensors(self.merge, tensors, s)
        group, groups = s.topology.intra_group, s.topology.inter_group
        changes = changes_of(found, self._theta)
        with phase(PHASE):
            radii = tensors.norms(changes, group)
        tensors.scale(changes, to_directions(radii, plain))
        for work in [groups.allreduce(x, "mean") for x in changes]:
            work.wait()
        with phase(PHASE):
            lengths = tensors.norms(changes, group)
            both = torch.stack([radii, lengths])
            groups.allreduce(both, "mean").wait()  # the same bits in all groups, on any hosts
        factors, cancelled = from_directions(both[0], both[1], plain, tensors.slots)
        tensors.scale(changes, factors)
        self._take_plain_mean(cancelled, tensors, changes, found, s)
        for w, theta, change in zip(found, self._theta, changes, strict=True):
            w.copy_(change.add_(theta))
        self.set_reference(found)
        return found

    def set_reference(self, common: Sequence[Tensor]) -> None:
        """Set θ to `common`, the model from which all groups train on."""
        for theta, w in zip(self._theta, common, strict=True):
            theta.copy_(w)

    def memory_bytes(self, m: ModelLayout) -> float:
        return m.own_elements()

    def comm_ops(self, m: ModelLayout) -> Iterator[CommOp]:
        """Yield the operations of a synchronization in which no directions cancel."""
        norms = FLOAT64 * len(m.layers)
        yield allreduce("intra_group", norms, PHASE)
        yield from (replace(x, bucket=None) for x in Mean().comm_ops(in_wide(m)))
        yield allreduce("intra_group", norms, PHASE)
        yield allreduce("inter_group", 2 * norms, PHASE)

    def state_dict(self) -> State:
        return State(sharded={"theta": self._theta} if self._theta else {})

    def load_state_dict(self, state: State) -> None:
        """Load the state; if it has no θ, the next synchronization is treated as the first."""
        self._theta = state.sharded.get("theta", [])

    def _take_plain_mean(
        self,
        chosen: frozenset[int],
        tensors: ByTensor,
        changes: Sequence[Tensor],
        found: Sequence[Tensor],
        s: StepContext,
    ) -> None:
        """Set the tensors `chosen` in `changes` to the plain mean; collective over the groups if any is."""
        if not chosen:
            return
        moved = changes_of(found, self._theta)
        for (number, mine), (_, x) in zip(tensors.views(changes), tensors.views(moved), strict=True):
            if number in chosen:
                mean = x.clone()
                s.topology.inter_group.allreduce(mean, "mean").wait()
                mine.copy_(mean)


def plain_tensors(merge: RadialDirectional, tensors: ByTensor, s: StepContext) -> frozenset[int]:
    """Return the numbers of the tensors that take the plain mean.

    Raises `UserError` if a name in `plain_mean` is that of no tensor.
    """
    names = [merge.plain_mean] if isinstance(merge.plain_mean, str) else merge.plain_mean
    for name in names:
        if not any(fnmatchcase(slot.name, name) for slot in tensors.slots):
            raise UserError(
                f"plain_mean: no trainable parameter of the model is called {name!r}", key="plain_mean"
            )
    return frozenset(
        i
        for i, slot in enumerate(tensors.slots)
        if slot.param.ndim < 2
        or slot.param in s.fixed.embeddings
        or any(fnmatchcase(slot.name, name) for name in names)
    )


def require_alone(**others: object) -> None:
    """Raise `UserError` if one of `others`, arguments by name, is to be combined with `merge`."""
    for name, value in others.items():
        if value is not None:
            raise UserError(
                f"merge: it cannot be combined with {name}: leave one of the two out", key="merge"
            )


def changes_of(models: Sequence[Tensor], theta: Sequence[Tensor]) -> list[Tensor]:
    """Return how `models` have changed from `theta`, in the dtype of sums."""
    return [
        w.to(accumulation_dtype(w.dtype)) - x.to(accumulation_dtype(w.dtype))
        for w, x in zip(models, theta, strict=True)
    ]


def to_directions(radii: Tensor, plain: frozenset[int]) -> list[float]:
    """Return the factor of each tensor that makes its direction of its change; 1 for those in `plain`.

    The factor is NaN if the change is not finite, so that the average shows it.
    """
    return [1.0 if i in plain else _direction(r) for i, r in enumerate(radii.tolist())]


def _direction(radius: float) -> float:
    if radius == 0:
        return 0.0
    return 1 / radius if math.isfinite(radius) else math.nan


def from_directions(
    radii: Tensor, lengths: Tensor, plain: frozenset[int], slots: Sequence[Slot]
) -> tuple[list[float], frozenset[int]]:
    """Return the factor r/‖d‖ of each tensor, and the tensors whose directions cancel, with the factor 0.

    `radii` and `lengths` are r and ‖d‖ of each tensor, in the order of `slots`.
    """
    pairs = list(zip(radii.tolist(), lengths.tolist(), strict=True))
    least = [max(CANCELLED, torch.finfo(accumulation_dtype(slot.param.dtype)).eps) for slot in slots]
    cancelled = frozenset(i for i, (r, d) in enumerate(pairs) if i not in plain and r and d < least[i])
    factors = [
        1.0 if i in plain else r / d if r and i not in cancelled else 0.0 for i, (r, d) in enumerate(pairs)
    ]
    return factors, cancelled


def in_wide(m: ModelLayout) -> ModelLayout:
    """Return the layout `m` with elements of the width in which they are summed."""
    return replace(m, buckets=tuple(replace(b, width=b.wide) for b in m.buckets))
