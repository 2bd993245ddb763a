"""What a group adds to an average of some fragments of the model, and what comes out of it."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Protocol

import torch
from torch import Tensor

from hpcsgd.comm import phase
from hpcsgd.core.norm import squared_norm, sum_on_host
from hpcsgd.core.replica_groups import Facts
from hpcsgd.core.step import StepContext
from hpcsgd.core.waits import Quorum
from hpcsgd.parts.averagers.by_tensor import ByTensor
from hpcsgd.parts.averagers.elastic_mean import rebased
from hpcsgd.parts.averagers.radial_directional import (
    PHASE,
    RadialDirectional,
    changes_of,
    from_directions,
    plain_tensors,
    to_directions,
)
from hpcsgd.parts.averagers.token_weights import factor_of, scaled


class Part(Protocol):
    """One fragment in the model of this group."""

    @property
    def norm(self) -> float:
        """The norm of its change since its last synchronization."""
        ...

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The tensors to average, which hold the means afterwards."""
        ...

    @property
    def is_model(self) -> bool:
        """True if the tensors are the model itself; otherwise they are changes of it."""
        ...

    def merged(self, theta: Sequence[Tensor], s: StepContext) -> Sequence[Tensor]:
        """Return the groups' merged fragment, whose θ is `theta`, once `tensors` hold the means."""
        ...


class MeanPart:
    """A fragment of which the mean is taken: its model `w`, with the `norm` of its change."""

    is_model = True

    def __init__(self, w: Sequence[Tensor], norm: float) -> None:
        self.tensors, self.norm = w, norm

    def merged(self, theta: Sequence[Tensor], s: StepContext) -> Sequence[Tensor]:
        return self.tensors


def mean_parts(
    models: Sequence[Sequence[Tensor]], theta: Sequence[Sequence[Tensor]], s: StepContext
) -> Sequence[MeanPart]:
    """Return the fragments `models`, which were `theta`. Collective in a sharded group."""
    pairs = (zip(w, old, strict=True) for w, old in zip(models, theta, strict=True))
    squares = torch.stack([sum_on_host(squared_norm(x - y) for x, y in pair) for pair in pairs])
    if s.sharded:
        s.topology.intra_group.allreduce(squares).wait()
    return [MeanPart(w, norm) for w, norm in zip(models, squares.sqrt().tolist(), strict=True)]


class RadialPart:
    """A fragment of which the radial-directional average is taken: its `changes`, in the tensors `places`.

    `radii` are the norms of its tensors' changes. The tensors in `plain` take the plain mean. A tensor that
    two fragments share has a direction in each of them.
    """

    is_model = False

    def __init__(
        self, places: ByTensor, plain: frozenset[int], changes: Sequence[Tensor], radii: Tensor
    ) -> None:
        self._places, self._plain, self._changes = places, plain, changes
        self.norm = radii.square().sum().sqrt().item()
        self._radii = radii.to(changes[0].device)
        self._places.scale(self._changes, to_directions(radii, self._plain))
        self.tensors = [*self._changes, self._radii]

    def merged(self, theta: Sequence[Tensor], s: StepContext) -> Sequence[Tensor]:
        with phase(PHASE):
            lengths = self._places.norms(self._changes, s.topology.intra_group if s.sharded else None)
        factors, _ = from_directions(self._radii, lengths, self._plain, self._places.slots)
        self._places.scale(self._changes, factors)
        return [change.add_(x).to(x.dtype) for change, x in zip(self._changes, theta, strict=True)]


def radial_parts(
    merge: RadialDirectional,
    cuts: Sequence[Sequence[Sequence[slice]]],
    models: Sequence[Sequence[Tensor]],
    theta: Sequence[Sequence[Tensor]],
    s: StepContext,
) -> Sequence[RadialPart]:
    """Return the fragments `models`, which were `theta`; `cuts` say where they are.

    Collective in a sharded group: one allreduce has the norms in all fragments.
    """
    places = [ByTensor.of_buckets(s.buckets, of_fragment) for of_fragment in cuts]
    plain = plain_tensors(merge, places[0], s)
    changes = [changes_of(w, old) for w, old in zip(models, theta, strict=True)]
    squares = torch.stack([each.squares(x) for each, x in zip(places, changes, strict=True)])
    if s.sharded:
        with phase(PHASE):
            s.topology.intra_group.allreduce(squares).wait()
    parts = zip(places, changes, squares.sqrt(), strict=True)
    return [RadialPart(each, plain, x, radii) for each, x, radii in parts]


class FragmentsContribution:
    """What group `index` adds to an average: its fragments `parts`, whose θ is `theta`.

    `shared`: for each fragment, what is the same in all groups. `part`: the index of the fragment that is
    due for this group; None: all of them. `weights`: the group's weight in the mean of each fragment, or
    nothing if all groups weigh alike.
    """

    def __init__(
        self,
        index: int,
        parts: Sequence[Part],
        theta: Sequence[Sequence[Tensor]],
        shared: Sequence[Sequence[Tensor]],
        quorum: Quorum | None,
        part: int | None,
        weights: Sequence[float],
    ) -> None:
        self._index, self.parts, self.part, self._theta, self._shared = index, parts, part, theta, shared
        self.weights = weights
        self.norms: Sequence[float] = [each.norm for each in parts]
        self.shared: Sequence[Tensor] = [x for each in shared for x in each]
        self.late_rounds = quorum.late_rounds if quorum is not None else 0
        self.buffers: Sequence[Tensor] = ()
        """Tensors that every round averages, in addition to the fragments. The share of a group in their mean
        is its mean share in the fragments that the round averages."""
        self.t, self.counts = 0, False
        """The updates that the groups have done; and True if this group counts in the round."""
        self.moved = [0] * len(parts)
        """For each fragment, the number of groups in the mean, or 0 if none of them has changed it."""
        self._averaged: int | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [*(x for each in self.parts for x in each.tensors), *self.buffers]

    def shared_of(self, p: int) -> Sequence[Tensor]:
        """Return the tensors in `shared` that belong to fragment `p`."""
        return self._shared[p]

    def averages(self, p: int) -> bool:
        """Return whether the round averages fragment `p`."""
        return self._averaged in (None, p)

    def __call__(self, facts: Facts, newest: Sequence[Tensor] = ()) -> Sequence[Tensor | None]:
        norms = facts.norms
        self.t, self._averaged, self.counts = facts.t, facts.part, self._index in norms
        factors = [factor_of(facts.weights, self._index, p) for p in range(len(self.parts))]
        found: list[Tensor | None] = []
        rest = iter(newest)
        for p, (each, theta, shared) in enumerate(zip(self.parts, self._theta, self._shared, strict=True)):
            self.moved[p] = len(norms) if any(row[p] for row in norms.values()) else 0
            theirs = [next(rest) for _ in shared] if newest else []
            if not self.averages(p):
                found += [None] * len(each.tensors)
            elif newest and each.is_model:
                found += scaled(rebased(each.tensors, theta, theirs[: len(theta)]), factors[p])
            else:
                found += scaled(each.tensors, factors[p])
        of_buffers = fmean(x for p, x in enumerate(factors) if self.averages(p))
        return [*found, *scaled(self.buffers, of_buffers)]
