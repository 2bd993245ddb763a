"""One step, and what takes part in it: an exchange inside the group, a rule for when and how groups meet.

backward → exchange in the group → update own chunk → [when?] average across groups [how?] → allgather
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, optim

from hpcsgd.comm import Work
from hpcsgd.core.agreement import Agreement, Call, Comparison
from hpcsgd.core.elements import as_elements
from hpcsgd.core.flat import Bucket
from hpcsgd.core.norm import as_vector, squared_norm
from hpcsgd.core.topology import Topology
from hpcsgd.core.traffic import CommOp, ModelLayout, param_gathers
from hpcsgd.core.traits import GradReduceTraits, ScheduleTraits


@dataclass(frozen=True, slots=True)
class TrainingContext:
    """What stays as it is from the first step of a training to the last."""

    topology: Topology
    buckets: Sequence[Bucket]
    """The model as vectors `w` and `g`, with this position's chunks `param_shard` and `grad_shard`, in
    backward order."""
    optimizer_state: OptimizerStateView
    buffers: Sequence[Tensor] = ()
    """The model's float buffers, such as batch-norm statistics: those that it has when they are read."""
    updates_shards: bool = True
    """Whether each position updates its own chunks alone, and not all of w."""
    grads_reduced: bool = True
    """Whether gradients are in the buckets; where nothing is exchanged they are where autograd put them."""


@dataclass(frozen=True, slots=True)
class ReduceContext:
    """All an exchange may see. It runs while the training loop goes on, perhaps into the next step: what it
    goes by was fixed when the first gradients left."""

    fixed: TrainingContext
    rates: tuple[float, ...]
    """The learning rate of each param group, warm-up included."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """What the exchange has to report of this step."""

    @property
    def topology(self) -> Topology:
        return self.fixed.topology

    @property
    def buckets(self) -> Sequence[Bucket]:
        return self.fixed.buckets


@dataclass(slots=True)
class StepContext:
    """All a method may see once gradients have been exchanged. `t` counts finished updates; in the t-th step,
    t = 1, 2, …"""

    fixed: TrainingContext
    t: int = 0
    rates: tuple[float, ...] = (0.0,)
    """The learning rate of each param group in this step, warm-up included."""
    loss: float | Tensor | None = None
    """Of this rank's batch, where the training loop said it. Who reads it waits for the device."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """What a method has to report of this step: whatever it is, metrics and curves take it as it comes. The
    `distance` of a meeting, and `shared`, the engine's, have a meaning to them."""
    squared_distance: float | None = None
    """What whoever measured D has noted: ‖what this rank brought − what it was left with‖² of the vectors."""
    squared_elsewhere: float = 0.0
    """The same of parts of the model that are averaged by themselves: it counts in D."""
    of_fragment: bool = False
    """Whether the vectors that are averaged are those of a fragment of the model, without padding."""

    @property
    def topology(self) -> Topology:
        return self.fixed.topology

    @property
    def buckets(self) -> Sequence[Bucket]:
        return self.fixed.buckets

    @property
    def optimizer_state(self) -> OptimizerStateView:
        return self.fixed.optimizer_state

    @property
    def buffers(self) -> list[Tensor]:
        return list(self.fixed.buffers)

    @property
    def sharded(self) -> bool:
        """Whether the group shares the model, so that w is this position's part of it and no more."""
        return self.topology.group_size > 1 and not any(b.cut_by_elements for b in self.buckets)

    @property
    def lr(self) -> float:
        """Of the first param group."""
        return self.rates[0]

    @property
    def shards(self) -> list[Tensor]:
        """The chunks `param_shard`: this position's part of the model."""
        return [b.param_shard for b in self.buckets]

    def filled(self, vectors: Sequence[Tensor]) -> list[list[slice]]:
        """Return where in each of `vectors`, as an averager of chunks is given them, there is no padding."""
        if self.of_fragment:
            return [[slice(0, x.numel())] for x in vectors]
        return [b.filled for b in self.buckets]

    def agreement(self) -> Comparison:
        """Begin to compare this step with that of the other groups: `wait()` raises `UserError` unless all
        synchronize after the same number of updates, at the same learning rates.

        An averager that needs all groups calls it before it sends anything, and waits before it changes
        anything; collective over the groups.
        """
        return Agreement.of_position(self.topology).begin(Call("a synchronization", self.t - 1, self.rates))

    def gradients(self) -> list[Tensor]:
        """Of the group, as the update is about to use them: of this position's chunks, or of all of w where
        it does not shard. Writing into them changes the update."""
        if not self.fixed.grads_reduced:
            for b in self.buckets:
                b.gather()
        return [b.grad_shard if self.fixed.updates_shards else b.g for b in self.buckets]

    def parts_of_gradient(self) -> list[Tensor]:
        """As `gradients`, but for padding, left where they are, and complex where parameters are."""
        if not self.fixed.grads_reduced:
            return [g for b in self.buckets for g in b.found()]
        shards = self.fixed.updates_shards
        return [as_elements(b.gradients_of_shard if shards else b.gradients, b.reals) for b in self.buckets]

    def squared_norm(self) -> Tensor:
        """This position's part of the squared norm of the group's gradient: over the group they add up. In
        float64; one read of the gradient."""
        return squared_norm_of(self.buckets, exchanged=self.fixed.grads_reduced)


def squared_norm_of(buckets: Sequence[Bucket], *, exchanged: bool) -> Tensor:
    """`StepContext.squared_norm` of the gradients in these buckets, or where autograd put them."""
    parts = [g for b in buckets for g in ([b.grad_shard] if exchanged else b.found())]
    norms = [squared_norm(g) for g in parts]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=buckets[0].w.device)
    return as_vector(norms).sum()


class OptimizerStateView(Protocol):
    """The optimizer's state (momentum, second moments, …) of what this position updates."""

    @property
    def optimizer(self) -> optim.Optimizer:
        """The user's, whose they are; to look at."""
        ...

    def tensors(self) -> dict[str, list[Tensor]]:
        """By name, every state tensor, the same ones in the same order on every group: what has never been
        updated is given the state that it would start from."""
        ...

    def reset(self) -> None:
        """Give the optimizer the state of a new one. Raises `UserError` where none can be made."""
        ...


@runtime_checkable
class GradReduce(Protocol):
    """How the K ranks of a group bring their gradients together, one bucket at a time.

    Runs as blocking code on the communication thread, while the backward pass of earlier layers goes on. What
    is left to another lane it may return: the next bucket begins meanwhile.
    """

    @property
    def traits(self) -> GradReduceTraits: ...

    def idle(self, topology: Topology) -> bool:
        """Whether there is nothing to do in this job, so that gradients stay where autograd put them."""
        ...

    def __call__(self, d: ReduceContext, b: Bucket) -> Work | None: ...


@runtime_checkable
class GroupGradReduce(GradReduce, Protocol):
    """One that can be among all ranks of the job, too."""

    def across_groups(self) -> GradReduce:
        """It, among them instead of those of a group."""
        ...


@runtime_checkable
class QuantizedGather(Protocol):
    """An exchange that says how the positions of a group give each other their chunks after an update, where
    these do not travel as they are: between two steps all have what has arrived, and each knows more of its
    own.
    """

    @property
    def quantizes_gather(self) -> bool: ...

    def restore(self, s: StepContext) -> None:
        """Before an update: `param_shard` of every bucket becomes what its position knows of it."""
        ...

    def gather(self, s: StepContext) -> None:
        """After it, in place of the allgather: `w` becomes what has arrived. Collective over the group."""
        ...

    def clear(self) -> None:
        """In place of `publish`, where chunks have been gathered as they are."""
        ...

    def gather_ops(self, m: ModelLayout) -> Iterable[CommOp]:
        """What `publish` sends, as `sends` tells of the exchange."""
        ...


def quantized_gather(exchange: GradReduce) -> QuantizedGather | None:
    """It, if it quantizes_gather."""
    return exchange if isinstance(exchange, QuantizedGather) and exchange.quantizes_gather else None


def gather_ops(exchange: GradReduce, m: ModelLayout) -> Iterable[CommOp]:
    """What makes one model of the positions' chunks after a step."""
    found = quantized_gather(exchange)
    return param_gathers(m) if found is None else found.gather_ops(m)


@runtime_checkable
class Schedule(Protocol):
    """Whether groups meet at this step: the same answer on every rank, or the model is torn."""

    @property
    def traits(self) -> ScheduleTraits: ...

    def __call__(self, s: StepContext) -> bool: ...
