"""One training step, and the protocols of the gradient reduction and the schedule in it.

backward → reduce gradients in the group → update own shard → [schedule] average across groups → allgather
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn, optim

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
    """The part of a `StepContext` that stays the same from the first step of a training to the last."""

    topology: Topology
    buckets: Sequence[Bucket]
    """The model in backward order: vectors `w` and `g`, with this rank's `param_shard` and `grad_shard`."""
    optimizer_state: OptimizerStateView
    buffers: Sequence[Tensor] = ()
    """The model's float buffers, such as batch-norm statistics: the buffers themselves, not copies."""
    updates_shards: bool = True
    """True: each rank updates only its own shards. False: each updates all of w."""
    grads_reduced: bool = True
    """True: the gradients are in the buckets. False: no gradients are reduced; they are in `param.grad`."""
    embeddings: frozenset[nn.Parameter] = frozenset()
    """The weights of the model's embeddings."""


@dataclass(frozen=True, slots=True)
class ReduceContext:
    """All that a gradient reduction may see of a step.

    The reduction runs while the training loop goes on, perhaps into the next step. So these values are fixed
    when the first gradients of the step are sent.
    """

    fixed: TrainingContext
    t: int
    """The number of this step, counted from 1."""
    rates: tuple[float, ...]
    """The learning rate of each parameter group, warm-up included."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """What the reduction reports of this step."""

    @property
    def topology(self) -> Topology:
        return self.fixed.topology

    @property
    def buckets(self) -> Sequence[Bucket]:
        return self.fixed.buckets


@dataclass(slots=True)
class StepContext:
    """All that a method may see of a step once gradients have been reduced.

    `t` is the number of this step, counted from 1.
    """

    fixed: TrainingContext
    t: int = 0
    in_step: bool = True
    """False in an average that the training script requests between two steps, by `average_models()`."""
    rates: tuple[float, ...] = (0.0,)
    """The learning rate of each parameter group in this step, warm-up included."""
    loss: float | Tensor | None = None
    """Loss of this rank's batch, if the training loop gave it. Reading it waits for the device."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """What a method reports of this step. Any key is logged and plotted. Two keys have a fixed meaning:
    `distance` is the model distance D at a synchronization. The engine sets `grads_shared` to 1 in a step in
    which groups shared gradients and did not average models."""
    squared_distance: float | None = None
    """‖x − x̄‖² of this rank's vectors x and their average x̄, set by the averager that measures the model
    distance D."""
    squared_elsewhere: float = 0.0
    """‖x − x̄‖² of those vectors of this rank that are averaged separately. D includes it."""
    left_out: tuple[int, ...] = ()
    """The groups, by index, whose models had no part in the average of this step. Set by an averager that
    leaves groups out. If it names all groups, every group has the model of the last synchronization again."""
    cuts: Sequence[Sequence[slice]] | None = None
    """None: the averaged vectors are shards. Otherwise they are those of a fragment of the model, without
    padding: for each bucket, the slices of `param_shard` that belong to it, joined to one vector."""

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
        """True if the group has one FSDP model, so that `w` of a bucket is only this rank's part of it."""
        return self.topology.group_size > 1 and not any(b.cut_by_elements for b in self.buckets)

    @property
    def lr(self) -> float:
        """The learning rate of the first parameter group."""
        return self.rates[0]

    @property
    def shards(self) -> list[Tensor]:
        """The `param_shard` of every bucket: this rank's part of the model."""
        return [b.param_shard for b in self.buckets]

    def filled(self, vectors: Sequence[Tensor]) -> list[list[slice]]:
        """Return the ranges of each of `vectors`, shards or vectors of a fragment, that are not padding."""
        if self.cuts is not None:
            return [[slice(0, x.numel())] for x in vectors]
        return [b.filled for b in self.buckets]

    def agreement(self) -> Comparison:
        """Begin to compare this step with that of the other groups, and return the comparison.

        The comparison's `wait()` raises `UserError` unless all groups synchronize after the same number of
        updates at the same learning rates. An averager that needs all groups calls this method before it
        sends anything, and `wait()` before it changes anything. Collective over the groups.
        """
        return Agreement.of_position(self.topology).begin(Call("a synchronization", self.t - 1, self.rates))

    def gradients(self) -> list[Tensor]:
        """Return the group's gradients as the update will use them.

        They are `grad_shard` of each bucket if this rank updates only its shards, otherwise `g`. Writing into
        them changes the update.
        """
        if not self.fixed.grads_reduced:
            for b in self.buckets:
                b.gather()
        return [b.grad_shard if self.fixed.updates_shards else b.g for b in self.buckets]

    def parts_of_gradient(self) -> list[Tensor]:
        """Return the same gradients as `gradients`, without padding, and complex where parameters are.

        They are views of the buckets, or the tensors in `param.grad` if no gradients are reduced.
        """
        if not self.fixed.grads_reduced:
            return [g for b in self.buckets for g in b.found()]
        shards = self.fixed.updates_shards
        return [as_elements(b.gradients_of_shard if shards else b.gradients, b.reals) for b in self.buckets]

    def squared_norm(self) -> Tensor:
        """Return this rank's part of the squared norm of the group's gradient, in float64.

        The parts of all ranks of the group add up to the squared norm. The gradient is read once.
        """
        return squared_norm_of(self.buckets, reduced=self.fixed.grads_reduced)


def squared_norm_of(buckets: Sequence[Bucket], *, reduced: bool) -> Tensor:
    """Return the squared norm of the `grad_shard` of all `buckets`; if not `reduced`, of all `param.grad`."""
    parts = [g for b in buckets for g in ([b.grad_shard] if reduced else b.found())]
    norms = [squared_norm(g) for g in parts]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=buckets[0].w.device)
    return as_vector(norms).sum()


class OptimizerStateView(Protocol):
    """The optimizer's state (momentum, second moment, …) for the parameters that this rank updates."""

    @property
    def optimizer(self) -> optim.Optimizer:
        """The user's optimizer, which holds the state; read-only."""
        ...

    def tensors(self) -> dict[str, list[Tensor]]:
        """Return all state tensors by their name, the same names in the same order in every group.

        A parameter that was never updated is given its initial state.
        """
        ...

    def reset(self) -> None:
        """Set the optimizer's state to that of a new optimizer, or raise `UserError` if none can be made."""
        ...


@runtime_checkable
class GradReduce(Protocol):
    """How the K ranks of a group reduce their gradients, one bucket at a time.

    A call is blocking code on the communication thread, while the backward pass of earlier layers goes on. It
    may return `Work` that another communication thread finishes. The next bucket begins meanwhile.
    """

    @property
    def traits(self) -> GradReduceTraits: ...

    def idle(self, topology: Topology) -> bool:
        """Return whether `topology` leaves nothing to reduce; gradients then stay in `param.grad`."""
        ...

    def __call__(self, d: ReduceContext, b: Bucket) -> Work | None: ...


@runtime_checkable
class GroupGradReduce(GradReduce, Protocol):
    """A gradient reduction that can also run among all ranks of the job."""

    def across_groups(self) -> GradReduce:
        """Return this gradient reduction as one among all ranks of the job, not only those of a group."""
        ...


@runtime_checkable
class QuantizedGather(Protocol):
    """A gradient reduction that also replaces the allgather of updated shards with a quantized one.

    Between two steps all ranks hold the quantized parameters. Each rank also keeps the exact values of its
    own shards.
    """

    @property
    def quantizes_gather(self) -> bool: ...

    def restore(self, s: StepContext) -> None:
        """Before an update, set `param_shard` of every bucket to the exact values that this rank keeps."""
        ...

    def gather(self, s: StepContext) -> None:
        """After an update, set `w` of every bucket to the quantized shards of the group. Collective.

        This replaces the allgather of the exact shards.
        """
        ...

    def clear(self) -> None:
        """Discard the exact values, because all shards were gathered unquantized instead of by `gather`."""
        ...

    def gather_ops(self, m: ModelLayout) -> Iterable[CommOp]:
        """Return the communication operations of `gather` for the model `m`."""
        ...


def quantized_gather(grad_reduce: GradReduce) -> QuantizedGather | None:
    """Return `grad_reduce` if it quantizes the gather of parameters, else None."""
    return grad_reduce if isinstance(grad_reduce, QuantizedGather) and grad_reduce.quantizes_gather else None


def gather_ops(grad_reduce: GradReduce, m: ModelLayout) -> Iterable[CommOp]:
    """Return the communication operations that gather the ranks' shards into one model after a step."""
    found = quantized_gather(grad_reduce)
    return param_gathers(m) if found is None else found.gather_ops(m)


@runtime_checkable
class Schedule(Protocol):
    """The part of a method that decides whether the groups average their models after this step.

    The decision must be the same on every rank. Otherwise the ranks of a group hold different models.
    """

    @property
    def traits(self) -> ScheduleTraits: ...

    def __call__(self, s: StepContext) -> bool: ...
