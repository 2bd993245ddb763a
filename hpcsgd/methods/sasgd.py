"""Sparse aggregation SGD: after every I steps, groups exchange the sums of their gradients.

G. Cong, O. Bhardwaj, M. Feng: An Efficient, Distributed Stochastic Gradient Descent Algorithm for
Deep-Learning Applications, ICPP 2017 (SASGD). The method is "sparse" in time; all elements are sent.

    in every step       g_i = ∇F(w_i),  w_i ← w_i − η·g_i,  G_i ← G_i + g_i
    after I of them     w ← w − η·(1/P)·Σ_i G_i,  w_i ← w,  G_i ← 0

where w_i is the model of group i, w the common model after the last synchronization, and η the learning rate.

Differences from the paper: the paper adds up the workers' sums, with a separate learning rate for the shared
model. Here the sums are averaged, and the rate is the one that the optimizer has in the step of the
synchronization. The paper's worker is a group here, in which each rank sends the shard that it owns.

The optimizer must be plain SGD, as in the paper; others are refused for these reasons:

- Momentum and Adam's preconditioning change the length or scale of local steps, compared with η·g. A
  synchronization would undo that progress. Adam's η times a sum of raw gradients is no meaningful step.
- Weight decay is not part of the gradient, so a synchronization would undo it. Put it into the loss.

`hierarchical` averages the results of any optimizer. With plain SGD at a constant learning rate, the training
is the same. If the rate changes between two synchronizations, its last value counts here for all of G_i. For
16-bit parameters, w and G_i are float32, also when they are sent.
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
"""The arguments of torch's SGD, with the values that they have in plain SGD."""


class Accumulated:
    """The averager that takes one step from the common model w with the groups' mean gradient sum.

    A rank does this for the shards that it owns.
    """

    traits = Traits(All())

    def __init__(self) -> None:
        self.agreed: list[Tensor] = []
        """This rank's shards of the common model w; empty before the first step."""
        self.sums: list[Tensor] = []
        """This rank's shards of G_i, the sum of the group's gradients since the last synchronization."""

    def prepare(self, vectors: Sequence[Tensor], s: StepContext) -> None:
        if s.topology.num_groups == 1:
            return
        if not self.agreed:
            _require_plain(s.optimizer_state.optimizer)
            _rate(s)
            self.agreed = [w.to(accumulation_dtype(w.dtype), copy=True) for w in vectors]
            self.sums = [torch.zeros_like(w) for w in self.agreed]
        if not s.in_step:
            return
        s.gradients()  # copies the gradients into the buckets if they were not reduced
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
        return [allreduce("inter_group", m.shard(b) * b.wide) for b in m.buckets]

    def state_dict(self) -> State:
        return State(sharded={"agreed": self.agreed, "sums": self.sums}) if self.agreed else State()

    def load_state_dict(self, state: State) -> None:
        self.agreed, self.sums = (state.sharded.get(name, []) for name in ("agreed", "sums"))


def _require_plain(optimizer: optim.Optimizer) -> None:
    """Raise `UserError` unless an update is exactly −η·g, the learning rate times the gradient."""
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
    """Return sparse aggregation SGD: after `sync_every` plain SGD steps, groups take one common step.

    The common step starts from the last common model and uses the mean of the groups' gradient sums. It
    undoes any other change of the parameters since then, such as a clamp, since it uses gradients alone.
    `hierarchical` keeps such a change, and is the same training if the learning rate is constant.

    Args:
        sync_every: Number of steps whose gradients are added up (the paper's I), at least 1.
        grad_reduce: How the gradients of a group are averaged in every step: `Dense()`, `AllToAll()` or
            `ReduceScatter()`. Default Dense().

    Returns:
        A `Method` for `DistributedOptimizer`. Use one instance per optimizer: it holds state.

    Raises:
        UserError: If `sync_every` is below 1; in the first step, unless the optimizer is SGD without momentum
            and weight decay, with one learning rate for all parameters.

    Shape:
        M parameters in total; each rank owns M/K of them. A rank sends 2·(P−1)/P·M/K elements per
        synchronization. It keeps the common model and the gradient sum, M/K elements each.

    Note:
        After a synchronization, `optimizer.metrics["distance"]` is the distance from the common model.

    Example:
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, hpcsgd.sasgd(sync_every=2))
        >>> train(optimizer, steps=4)
        >>> with optimizer.averaged_model() as distance:     # after a synchronization
        ...     distance
        0.0

    References:
        G. Cong, O. Bhardwaj, M. Feng: An Efficient, Distributed Stochastic Gradient Descent Algorithm for
        Deep-Learning Applications, ICPP 2017.

    See Also:
        `Sparse`: sends a part of the elements of every gradient.
    """
    return Method(grad_reduce=grad_reduce, schedule=Every(sync_every), averager=WithDistance(Accumulated()))
