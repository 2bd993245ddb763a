"""Federated averaging in a data centre: a few times per epoch, groups take the mean of some models.

H. B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Agüera y Arcas: Communication-Efficient Learning of Deep
Networks from Decentralized Data, AISTATS 2017, algorithm 1, in the form with which the SelSync paper compares
itself (section II-B there). C is the fraction of groups that are drawn, and E = 1/x is the part of an epoch
between two synchronizations:

    x times an epoch, at uniform intervals:
        S_t ← ⌈C·P⌉ groups drawn at random
        w ← the mean of w_i over S_t, sent to all groups

The share of local steps is known in advance: LSSR = 1 − x/S with S steps per epoch.

Differences from McMahan et al.:

- Every group trains all the time; the draw only selects which models enter the mean.
- All groups have the same weight, since their batches have the same size.
- E is a fraction of an epoch over all data, not a number of epochs over a client's own data.
- The draw follows from the seed and t, so that it needs no message.
- There is no server. The mean is an allreduce, to which groups that are not drawn contribute zeros. For
  16-bit parameters it is computed in float32.
- By default each group keeps its own optimizer state.
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
    """The schedule with x synchronizations in every S steps, at intervals as even as whole steps allow.

    The groups synchronize after update t if ⌊t·x/S⌋ is larger than after the update before.
    """

    x: int
    S: int

    def __post_init__(self) -> None:
        if self.S < 1:
            raise UserError(
                f"steps_per_epoch = {self.S}: expected at least 1 step", key="steps_per_epoch", value=self.S
            )
        if type(self.x) is not int or not 1 <= self.x <= self.S:
            raise UserError(
                f"per_epoch = {self.x}: expected 1 to {count_text(self.S, 'synchronization')} in an epoch of "
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
    """The averager that sets every group's model w to the mean over ⌈C·P⌉ groups, shard by shard.

    These groups are drawn anew, from `seed` and t, for each synchronization.
    """

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
        """Return the indices of those of the P groups whose models enter the mean after step t."""
        count = math.ceil(Fraction(str(self.C)) * P)  # exact decimals: 0.55 of 100 groups is 55
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
        return [allreduce("inter_group", m.shard(b) * b.wide) for b in m.buckets]


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
    """Return federated averaging: a few times per epoch, all groups take the mean of randomly drawn ones.

    The synchronizations are spaced as evenly as whole steps allow. Of all steps, the fraction 1 −
    `per_epoch`/`steps_per_epoch` is local (LSSR). Unlike federated learning on devices, every group trains
    all the time.

    Args:
        fraction: Fraction of the groups that are drawn (the paper's C), > 0 and ≤ 1. Default 1.0: local SGD
            with a period given per epoch.
        per_epoch: Synchronizations per epoch (1/E), 1 to `steps_per_epoch`. Default 4.
        steps_per_epoch: Steps in an epoch over all data (S), `len(loader)`. A job file may leave it out.
        seed: Seed of the draw. Together with the step it determines which groups are drawn, without a
            message. Default 0.
        grad_reduce: How the gradients of a group are averaged in every step: `Dense()`, `AllToAll()`,
            `ReduceScatter()` or `Sparse(...)`. Default Dense().
        optimizer_state: What happens to momentum and other optimizer state at a synchronization:
            `keep_state`, `AverageState` or `ResetState`. Default keep_state.

    Returns:
        A `Method` for `DistributedOptimizer`. Use one instance per optimizer: it may hold state.

    Raises:
        UserError: If `fraction` or `per_epoch` is outside these bounds.

    Shape:
        M parameters in total; each rank owns M/K of them. A rank sends 2·(P−1)/P·M/K elements per
        synchronization.

    Note:
        After a synchronization, `optimizer.metrics["distance"]` is the distance from the mean of the drawn
        groups.

    Example:
        >>> method = hpcsgd.fedavg(fraction=0.5, per_epoch=2, steps_per_epoch=4)
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> train(optimizer, steps=2)
        >>> optimizer.metrics["distance"] > 0
        True

    References:
        H. B. McMahan et al.: Communication-Efficient Learning of Deep Networks from Decentralized Data,
        AISTATS 2017, algorithm 1, in the form of SelSync's section II-B.

    See Also:
        `hierarchical`: averages all groups after a fixed number of steps.
    """
    how = optimizer_state(WithDistance(MeanOfSome(fraction, seed)))
    return Method(grad_reduce=grad_reduce, schedule=PerEpoch(per_epoch, steps_per_epoch), averager=how)
