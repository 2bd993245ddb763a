"""One training step, and the protocols of the gradient reduction and the schedule in it.

backward → reduce gradients in the group → update own shard → [schedule] average across groups → allgather
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
    """What stays the same from the first step of a training to the last."""

    topology: Topology
    buckets: Sequence[Bucket]
    """The model as vectors `w` and `g`, with this rank's `param_shard` and `grad_shard`; backward order."""
    optimizer_state: OptimizerStateView
    buffers: Sequence[Tensor] = ()
    """The model's float buffers, such as batch-norm statistics, as they are when they are read."""
    updates_shards: bool = True
    """True: each rank updates only its own shards. False: each updates all of w."""
    grads_reduced: bool = True
    """True: the gradients are in the buckets. False: no gradient is reduced, they are in `param.grad`."""


@dataclass(frozen=True, slots=True)
class ReduceContext:
    """All that a gradient reduction may see of a step.

    The reduction runs while the training loop goes on, perhaps into the next step. So these values are fixed
    when the first gradients of the step are sent.
    """

    fixed: TrainingContext
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

    `t` counts finished updates: it is t = 1, 2, … in the t-th step.
    """

    fixed: TrainingContext
    t: int = 0
    rates: tuple[float, ...] = (0.0,)
    """The learning rate of each parameter group in this step, warm-up included."""
    loss: float | Tensor | None = None
    """Loss of this rank's batch, if the training loop gave it. Reading it waits for the device."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """What a method reports of this step. Metrics and plots take any key. Two keys have a meaning to them:
    `distance` of a synchronization, and `shared`, which the engine sets."""
    squared_distance: float | None = None
    """‖what this rank brought − what it received‖² of the vectors, set by the averager that measures D."""
    squared_elsewhere: float = 0.0
    """The same for parts of the model that are averaged separately. D includes it."""
    of_fragment: bool = False
    """True if the averaged vectors are those of a fragment of the model, without padding."""

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
        """True if the group shares one FSDP model, so that w is only this rank's part of it."""
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
        """Return the ranges without padding in each of `vectors`, which are shards or a fragment's."""
        if self.of_fragment:
            return [[slice(0, x.numel())] for x in vectors]
        return [b.filled for b in self.buckets]

    def agreement(self) -> Comparison:
        """Begin to compare this step with that of the other groups, and return the comparison.

        Its `wait()` raises `UserError` unless all groups synchronize after the same number of updates at the
        same learning rates. An averager that needs all groups calls this before it sends anything, and waits
        before it changes anything. Collective over the groups.
        """
        return Agreement.of_position(self.topology).begin(Call("a synchronization", self.t - 1, self.rates))

    def gradients(self) -> list[Tensor]:
        """Return the group's gradients as the update will use them.

        These are the shards that this rank updates, or all of w if it updates all. Writing into them changes
        the update.
        """
        if not self.fixed.grads_reduced:
            for b in self.buckets:
                b.gather()
        return [b.grad_shard if self.fixed.updates_shards else b.g for b in self.buckets]

    def parts_of_gradient(self) -> list[Tensor]:
        """Return the same as `gradients` in place, without padding, and complex where parameters are."""
        if not self.fixed.grads_reduced:
            return [g for b in self.buckets for g in b.found()]
        shards = self.fixed.updates_shards
        return [as_elements(b.gradients_of_shard if shards else b.gradients, b.reals) for b in self.buckets]

    def squared_norm(self) -> Tensor:
        """Return this rank's part of the squared norm of the group's gradient, in float64.

        The parts of all ranks of the group add up to the squared norm. Reads the gradient once.
        """
        return squared_norm_of(self.buckets, exchanged=self.fixed.grads_reduced)


def squared_norm_of(buckets: Sequence[Bucket], *, exchanged: bool) -> Tensor:
    """Return the squared norm of the gradients in these buckets, or in `param.grad` if not `exchanged`."""
    parts = [g for b in buckets for g in ([b.grad_shard] if exchanged else b.found())]
    norms = [squared_norm(g) for g in parts]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=buckets[0].w.device)
    return as_vector(norms).sum()


class OptimizerStateView(Protocol):
    """The optimizer's state (momentum, second moment, …) of what this rank updates."""

    @property
    def optimizer(self) -> optim.Optimizer:
        """The user's optimizer that holds the state; read only."""
        ...

    def tensors(self) -> dict[str, list[Tensor]]:
        """Return every state tensor by name, the same ones in the same order on every group.

        A parameter that was never updated is given its initial state.
        """
        ...

    def reset(self) -> None:
        """Give the optimizer the state of a new one, or raise `UserError` if none can be made."""
        ...


@runtime_checkable
class GradReduce(Protocol):
    """How the K ranks of a group reduce their gradients, one bucket at a time.

    Runs as blocking code on the communication thread, while the backward pass of earlier layers goes on. It
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
        """Return the same reduction among all ranks instead of those of a group."""
        ...


@runtime_checkable
class QuantizedGather(Protocol):
    """A gradient reduction that also replaces the allgather of updated shards, by a quantized one.

    Between two steps all ranks hold the quantized parameters. Each rank also keeps the exact values of its
    own shards.
    """

    @property
    def quantizes_gather(self) -> bool: ...

    def restore(self, s: StepContext) -> None:
        """Set `param_shard` of every bucket to the exact values that this rank keeps, before an update."""
        ...

    def gather(self, s: StepContext) -> None:
        """Replace the allgather after an update: set `w` to the quantized values. Collective in the group."""
        ...

    def clear(self) -> None:
        """Discard the exact values after shards were gathered unquantized, without `gather`."""
        ...

    def gather_ops(self, m: ModelLayout) -> Iterable[CommOp]:
        """Return the operations of `gather` for the model `m`."""
        ...


def quantized_gather(exchange: GradReduce) -> QuantizedGather | None:
    """Return `exchange` if it quantizes the gather of parameters, else None."""
    return exchange if isinstance(exchange, QuantizedGather) and exchange.quantizes_gather else None


def gather_ops(exchange: GradReduce, m: ModelLayout) -> Iterable[CommOp]:
    """Return the operations that gather the ranks' shards into one model after a step."""
    found = quantized_gather(exchange)
    return param_gathers(m) if found is None else found.gather_ops(m)


@runtime_checkable
class Schedule(Protocol):
    """Decides whether the groups average their models after this step.

    The answer must be the same on every rank. Otherwise the ranks of a group hold different models.
    """

    @property
    def traits(self) -> ScheduleTraits: ...

    def __call__(self, s: StepContext) -> bool: ...
