"""Sparse aggregation SGD: groups send each other the sum of their gradients, after every I steps.

G. Cong, O. Bhardwaj, M. Feng: An Efficient, Distributed Stochastic Gradient Descent Algorithm for
Deep-Learning Applications, ICPP 2017 (SASGD); "sparse" in time, all elements are sent.

    in every step       g_i = ∇F(w_i),  w_i ← w_i − η·g_i,  G_i ← G_i + g_i
    after I of them     w ← w − η·(1/P)·Σ_i G_i,  w_i ← w,  G_i ← 0

where w is what all groups had after the last meeting.

Differences from the paper: its workers sum with a rate of their own for the shared model, here the rate is
the optimizer's, in the step of the meeting, and the sum a mean; its worker is a group here, each of whose
positions sends the chunk that it owns.

The optimizer has to be plain SGD, as in the paper, and others are refused. Momentum and Adam's
preconditioning make local steps longer or of another scale than η·g: the meeting would take that progress
back, and Adam's η times a sum of raw gradients is no step at all. Weight decay is no part of the gradient, so
that meetings would undo it: put it into the loss. `hierarchical` averages what any optimizer makes. With a
constant rate that is the same training; where the rate changes between two meetings, here its last value
counts for all of G_i. Of 16-bit parameters w and G_i are float32, also on their way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, optim

from hpcsgd.arguments import checked
from hpcsgd.comm import accumulation_dtype
from hpcsgd.core.averager import Traits
from hpcsgd.core.method import Method
from hpcsgd.core.state import State
from hpcsgd.core.step import GradReduce, StepContext
from hpcsgd.core.traffic import CommOp, ModelLayout, allreduce
from hpcsgd.core.waits import All
from hpcsgd.errors import UserError
from hpcsgd.methods.registry import method
from hpcsgd.parts.averagers import WithDistance
from hpcsgd.parts.grad_reduces import Dense
from hpcsgd.parts.schedules import Every

PAPER = """
@inproceedings{cong2017sasgd,
  title = {An Efficient, Distributed Stochastic Gradient Descent Algorithm for Deep-Learning Applications},
  author = {Cong, Guojing and Bhardwaj, Onkar and Feng, Minwei},
  booktitle = {International Conference on Parallel Processing (ICPP)},
  year = {2017},
}
"""

PLAIN = {"momentum": 0, "weight_decay": 0, "maximize": False}


class Accumulated:
    """w ← w − η·(mean of the groups' sums of gradients since the last meeting), chunk by chunk."""

    traits = Traits(All())

    def __init__(self) -> None:
        self.agreed: list[Tensor] = []
        """w; nothing before the first step."""
        self.sums: list[Tensor] = []
        """G_i."""

    def prepare(self, vectors: Sequence[Tensor], s: StepContext) -> None:
        if s.topology.num_groups == 1:
            return
        if not self.agreed:
            _require_plain(s.optimizer_state.optimizer)
            _rate(s)
            self.agreed = [w.to(accumulation_dtype(w.dtype), copy=True) for w in vectors]
            self.sums = [torch.zeros_like(w) for w in self.agreed]
        s.gradients()  # brings them into the buckets where nothing was exchanged
        for total, b in zip(self.sums, s.buckets, strict=True):
            total.add_(b.grad_shard)

    def average(self, vectors: Iterable[Tensor], s: StepContext) -> list[Tensor]:
        found, rate = list(vectors), _rate(s)
        s.agreement().wait()
        for own, w, total in zip(found, self.agreed, self.sums, strict=True):
            s.topology.inter_group.allreduce(total, "mean").wait()
            w.sub_(total, alpha=rate)
            own.copy_(w)
            total.zero_()
        return found

    def memory_bytes(self, m: ModelLayout) -> float:
        return 2 * m.own_elements(wide=True)

    def comm_ops(self, m: ModelLayout) -> list[CommOp]:
        return [allreduce("cross", m.shard(b) * b.wide) for b in m.buckets]

    def state_dict(self) -> State:
        return State(sharded={"agreed": self.agreed, "sums": self.sums}) if self.agreed else State()

    def load_state_dict(self, state: State) -> None:
        self.agreed, self.sums = (state.sharded.get(name, []) for name in ("agreed", "sums"))


def _require_plain(optimizer: optim.Optimizer) -> None:
    """Raise `UserError` unless an update is −η·g and no more."""
    found = [
        f"{name} = {group[name]}"
        for group in optimizer.param_groups
        for name, plain in PLAIN.items()
        if group.get(name, plain) != plain
    ]
    if type(optimizer) is not optim.SGD or found:
        given = " with ".join([type(optimizer).__name__, *found[:1]])
        raise UserError(
            f"sasgd: the optimizer is {given}; expected plain SGD, without momentum and weight decay: "
            "others go with hierarchical"
        )


def _rate(s: StepContext) -> float:
    rates = sorted(set(s.rates))
    if len(rates) > 1:
        raise UserError(
            f"sasgd: lr = {', '.join(map(str, rates))}: one learning rate is needed for all parameters"
        )
    return rates[0]


@method(cite=PAPER)
@checked
def sasgd(sync_every: int, grad_reduce: GradReduce = Dense()) -> Method:  # noqa: B008 - frozen
    """Groups add up what `sync_every` plain SGD steps saw, and take one step by the mean of it together.

    Every rank keeps two more M/K and sends 2·(P−1)/P·M/K elements at a meeting. Noted there: `distance`, from
    what the groups agree on.

    A meeting takes back what is written into parameters between two steps, as by a clamp, since it is made of
    gradients alone: `hierarchical` keeps that, and is the same training where the rate is constant.

    Not to be confused with sparse exchanges (`Sparse`): it is sparse in time, all elements are sent.

    Args:
        sync_every: I, steps whose gradients are added up, at least 1.
        grad_reduce: of gradients inside a group: `Dense()`, `AllToAll()` or `ReduceScatter()`. Default
            Dense().

    Raises:
        UserError: for `sync_every` below 1; in the first step unless the optimizer is SGD without momentum
            and weight decay, with one learning rate for all parameters.

    Example:
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, hpcsgd.sasgd(sync_every=2))
        >>> train(optimizer, steps=4)
        >>> with optimizer.averaged_model() as distance:     # they have just met
        ...     distance
        0.0

    Source:
        G. Cong, O. Bhardwaj, M. Feng: An Efficient, Distributed Stochastic Gradient Descent Algorithm for
        Deep-Learning Applications, ICPP 2017.
    """
    return Method(grad_reduce=grad_reduce, schedule=Every(sync_every), averager=WithDistance(Accumulated()))
