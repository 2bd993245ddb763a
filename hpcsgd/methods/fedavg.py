"""Federated averaging, as data centres use it: a few meetings an epoch, of some of the groups.

H. B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Agüera y Arcas: Communication-Efficient Learning of Deep
Networks from Decentralized Data, AISTATS 2017, algorithm 1, in the form that SelSync is compared with (its
section II-B): with (C, E), E = 1/x,

    x times an epoch, at uniform intervals:
        S_t ← ⌈C·P⌉ groups drawn at random
        w ← the mean of w_i over S_t, sent to all groups

The share of local steps is known in advance: LSSR = 1 − x/S with S steps an epoch.

Differences from McMahan et al.: every group trains all the time, and only who is drawn counts; all groups
count alike, since their batches are of one size; E is of an epoch over all data, not of epochs over a
client's own. Who is drawn follows from the seed and t, so that nobody needs to be told. There is no server:
the mean is an allreduce, to which those who are not drawn bring zeros, in float32 for 16-bit parameters.
Moments stay the groups' own unless asked otherwise.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from torch import Tensor

from hpcsgd.arguments import checked
from hpcsgd.comm import accumulation_dtype
from hpcsgd.core.averager import Traits
from hpcsgd.core.method import Method
from hpcsgd.core.step import GradReduce, StepContext
from hpcsgd.core.traffic import CommOp, ModelLayout, allreduce
from hpcsgd.core.traits import ScheduleTraits
from hpcsgd.core.waits import All, due
from hpcsgd.errors import UserError, count_text
from hpcsgd.methods.registry import method
from hpcsgd.parts.averagers import WithDistance, WithOptimizerState, keep_state
from hpcsgd.parts.grad_reduces import Dense

PAPER = r"""
@inproceedings{mcmahan2017fedavg,
  title = {Communication-Efficient Learning of Deep Networks from Decentralized Data},
  author = {McMahan, H. Brendan and Moore, Eider and Ramage, Daniel and Hampson, Seth and Ag{\"u}era y Arcas,
  Blaise}, booktitle = {International Conference on Artificial Intelligence and Statistics (AISTATS)},
  year = {2017},
  eprint = {1602.05629},
  archivePrefix = {arXiv},
}
"""


@dataclass(frozen=True)
class PerEpoch:
    """x meetings in every S steps, as evenly as whole steps can be: after those where ⌊t·x/S⌋ grows."""

    x: int
    S: int

    def __post_init__(self) -> None:
        if self.S < 1:
            raise UserError(
                f"steps_per_epoch = {self.S}: expected at least 1 step", key="steps_per_epoch", value=self.S
            )
        if type(self.x) is not int or not 1 <= self.x <= self.S:
            raise UserError(
                f"per_epoch = {self.x}: expected 1 to {count_text(self.S, 'meeting')} in an epoch of "
                f"{count_text(self.S, 'step')}",
                key="per_epoch",
                value=self.x,
            )

    @property
    def traits(self) -> ScheduleTraits:
        return ScheduleTraits(known_before_update=True, spacing=Fraction(self.S, self.x))

    def __call__(self, s: StepContext) -> bool:
        return due(s.t, Fraction(self.S, self.x))


@dataclass(frozen=True)
class MeanOfSome:
    """w ← the mean over ⌈C·P⌉ groups, drawn for each meeting, on every group; chunk by chunk."""

    C: float
    seed: int
    traits = Traits(All(), reads_gradients=False, vectors_only=True)

    def __post_init__(self) -> None:
        if not 0 < self.C <= 1:
            raise UserError(
                f"fraction = {self.C}: expected more than 0 and at most 1, of the groups",
                key="fraction",
                value=self.C,
            )

    def drawn(self, t: int, P: int) -> list[int]:
        """The groups that count in step t."""
        count = math.ceil(Fraction(str(self.C)) * P)  # as written: 0.55 of 100 groups are 55
        return random.Random(f"{self.seed} {t}").sample(range(P), count)

    def average(self, vectors: Iterable[Tensor], s: StepContext) -> list[Tensor]:
        found, drawn = list(vectors), self.drawn(s.t, s.topology.num_groups)
        s.agreement().wait()
        for w in found:
            x = w.to(accumulation_dtype(w.dtype))
            if s.topology.group_index not in drawn:
                x.zero_()
            s.topology.inter_group.allreduce(x).wait()
            w.copy_(x.div_(len(drawn)))
        return found

    def comm_ops(self, m: ModelLayout) -> list[CommOp]:
        return [allreduce("cross", m.shard(b) * b.wide) for b in m.buckets]


@method(cite=PAPER, delayable=True)
@checked
def fedavg(
    fraction: float = 1.0,
    per_epoch: int = 4,
    *,
    steps_per_epoch: int,
    seed: int = 0,
    grad_reduce: GradReduce = Dense(),  # noqa: B008 - frozen
    optimizer_state: WithOptimizerState = keep_state,
) -> Method:
    """Federated averaging: a few times an epoch all groups take the mean of some of them, drawn by lot.

    Meetings come as evenly as whole steps can be, and a part 1 − `per_epoch`/`steps_per_epoch` of all steps
    is made alone (LSSR). A rank sends 2·(P−1)/P·M/K elements at a meeting. Noted there: `distance`, from the
    mean of those drawn.

    Not to be confused with federated learning on devices: here every group trains all the time, and only who
    is drawn counts.

    Args:
        fraction: C, the part of the groups that are drawn, > 0 and ≤ 1. Default 1.0, with which it is local
            SGD by the epoch.
        per_epoch: 1/E, meetings an epoch, 1 to `steps_per_epoch`. Default 4.
        steps_per_epoch: S, steps in an epoch of all data, `len(loader)`. A job file need not say it.
        seed: who is drawn follows from it and the step, without a message. Default 0.
        grad_reduce: of gradients inside a group: `Dense()`, `AllToAll()`, `ReduceScatter()` or `Sparse(...)`.
            Default Dense().
        optimizer_state: what becomes of momentum at a meeting: `keep_state`, `AverageState` or `ResetState`.
            Default keep_state.

    Raises:
        UserError: for a fraction or a number of meetings outside these bounds.

    Example:
        >>> method = hpcsgd.fedavg(fraction=0.5, per_epoch=2, steps_per_epoch=4)
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> train(optimizer, steps=2)
        >>> optimizer.metrics["distance"] > 0
        True

    Source:
        H. B. McMahan et al.: Communication-Efficient Learning of Deep Networks from Decentralized Data,
        AISTATS 2017, algorithm 1, in the form of SelSync's section II-B.
    """
    how = optimizer_state(WithDistance(MeanOfSome(fraction, seed)))
    return Method(grad_reduce=grad_reduce, schedule=PerEpoch(per_epoch, steps_per_epoch), averager=how)
