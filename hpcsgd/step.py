"""What a method is made of: one step, an exchange inside the group, a rule for when and how groups meet.

backward → exchange in the group → update own chunk → [when?] average across groups [how?] → allgather
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, optim

from hpcsgd.flat import Bucket
from hpcsgd.norm import squared_norm
from hpcsgd.topology import Job


@runtime_checkable
class Stateful(Protocol):
    """A part of a method with a memory: all that a restart needs beside parameters and moments.

    Every rank has its own; another P × K starts without it.
    """

    def state_dict(self) -> dict[str, Any]:
        """Collective: messages under way are waited for."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@runtime_checkable
class Wrapping(Protocol):
    """A part of a method around another one."""

    @property
    def inner(self) -> Any: ...


@dataclass(slots=True)
class Step:
    """All a method may see. `t` counts finished updates; in the t-th step, t = 1, 2, …"""

    job: Job
    buckets: Sequence[Bucket]
    """The model as vectors `w` and `g`, with this position's chunks `own` and `g_own`, in backward order."""
    moments: Moments
    buffers: Sequence[Tensor] = ()
    """The model's float buffers, such as batch-norm statistics."""
    t: int = 0
    rates: tuple[float, ...] = (0.0,)
    """The learning rate of each param group in this step, warm-up included."""
    loss: float | None = None
    """Of this rank's batch, where the training loop said it."""
    shards: bool = True
    """Whether each position updates its own chunks alone, and not all of w."""
    exchanged: bool = True
    """Whether gradients are in the buckets; where nothing is exchanged they are where autograd put them."""
    notes: dict[str, float] = field(default_factory=dict)
    """What a method has to report of this step (the distance at a meeting, …), for metrics."""

    @property
    def lr(self) -> float:
        """Of the first param group."""
        return self.rates[0]

    def gradients(self) -> list[Tensor]:
        """Of the group, as the update is about to use them: of this position's chunks, or of all of w where
        `shards` is False. Writing into them changes the update."""
        if not self.exchanged:
            for b in self.buckets:
                b.gather()
        return [b.g_own if self.shards else b.g for b in self.buckets]

    def squared_norm(self) -> Tensor:
        """This position's part of the squared norm of the group's gradient: over the group they add up. In
        float64; one read of the gradient."""
        if self.exchanged:
            parts = [b.g_own for b in self.buckets]
        else:
            grads = [slot.param.grad for b in self.buckets for slot in b.slots]
            parts = [grad for grad in grads if grad is not None]
        norms = [squared_norm(g.reshape(-1)) for g in parts]
        return torch.stack(norms).sum() if norms else torch.zeros((), dtype=torch.float64)

    @property
    def owned(self) -> list[Tensor]:
        """The chunks `own`: this position's part of the model."""
        return [b.own for b in self.buckets]


class Moments(Protocol):
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


class Exchange(Protocol):
    """How the K ranks of a group bring their gradients together, one bucket at a time.

    Runs as blocking code on the communication thread, while the backward pass of earlier layers goes on. The
    step that it is given, `t` and `rates` included, was fixed when the first gradients left.
    """

    @property
    def shards(self) -> bool:
        """True: `b.g_own` is the result and each position updates its own chunk. False: `b.g` is."""
        ...

    def idle(self, job: Job) -> bool:
        """Whether there is nothing to do in this job, so that gradients stay where autograd put them."""
        ...

    def __call__(self, s: Step, b: Bucket) -> None: ...


class GroupExchange(Exchange, Protocol):
    """One that can be among all ranks of the job, too."""

    def across_groups(self) -> Exchange:
        """It, among them instead of those of a group."""
        ...


class Schedule(Protocol):
    """Whether groups meet at this step: the same answer on every rank, or the model is torn."""

    def __call__(self, s: Step) -> bool: ...


class Averager(Protocol):
    """What happens when groups meet."""

    @property
    def shards(self) -> bool:
        """True: it changes `own` of each bucket, the engine allgathers. False: it changes all of `w`."""
        ...

    def before_update(self, s: Step) -> None:
        """May move w or g between the exchange and the optimizer's update."""
        ...

    def __call__(self, s: Step) -> None: ...


@dataclass(frozen=True)
class Method:
    """A training method: exchange × when × how."""

    exchange: Exchange
    when: Schedule
    how: Averager

    def state_dict(self) -> dict[str, Any]:
        """The state of the parts that have one, by their role; collective."""
        return {role: part.state_dict() for role, part in self.stateful().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for role, part in self.stateful().items():
            part.load_state_dict(state[role])

    def stateful(self) -> dict[str, Stateful]:
        """The parts with a memory, by their role; inside others, too."""
        roles = {"exchange": self.exchange, "when": self.when, "how": self.how}
        return {name: part for role, whole in roles.items() for name, part in _stateful(role, whole)}


def _stateful(role: str, part: Any) -> Iterator[tuple[str, Stateful]]:
    if isinstance(part, Stateful):
        yield role, part
    if isinstance(part, Wrapping):
        yield from _stateful(f"{role}.inner", part.inner)
