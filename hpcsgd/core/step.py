"""What a method is made of: one step, an exchange inside the group, a rule for when and how groups meet.

backward → exchange in the group → update own chunk → [when?] average across groups [how?] → allgather
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, optim

from hpcsgd.core.capabilities import Counting
from hpcsgd.core.flat import Bucket
from hpcsgd.core.norm import squared_norm
from hpcsgd.core.topology import Job
from hpcsgd.errors import UserError

log = logging.getLogger(__name__)


State = dict[str, dict[str, Any]]
"""What a part of a method remembers, by name, in sections that say what becomes of it on another P × K:

    same     the same on all ranks: it goes everywhere
    mean     each rank has its number: all get their mean
    chunks   a list with what belongs to `own` of every bucket (to `w` where the averager does not shard): cut
             anew like the parameters, for another P the mean of the groups'; dropped where there is one group
    workers  by parameter as many elements, on each rank others: the mean over the ranks of a group, for
             another P over all; dropped where a group has nobody to exchange with
    own      of a group or rank as it was: dropped

What is dropped is said.
"""


@runtime_checkable
class Stateful(Protocol):
    """A part of a method with a memory: all that a restart needs beside parameters and moments."""

    def state_dict(self) -> State:
        """Collective: messages under way are waited for."""
        ...

    def load_state_dict(self, state: State) -> None:
        """Go on from there; of what is not in `state`, as new."""
        ...


@runtime_checkable
class Wrapping(Protocol):
    """A part of a method around another one: at this time, where these take turns."""

    @property
    def inner(self) -> Any: ...


@runtime_checkable
class Composed(Protocol):
    """A part of a method made of several, whose states are all kept."""

    @property
    def parts(self) -> Mapping[str, Any]: ...


@runtime_checkable
class Central(Protocol):
    """An averager for which the model is not the mean of what the groups train on: servers keep it, say."""

    def model(self) -> list[Tensor] | None:
        """This position's chunks of it, like `owned`, in float32 at least; None before the first update,
        when all groups have the same. Collective."""
        ...


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
    """What a method has to report of this step: whatever it is, metrics and curves take it as it comes. The
    `distance` of a meeting, and `shared`, the engine's, have a meaning to them."""

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


@runtime_checkable
class Exchange(Protocol):
    """How the K ranks of a group bring their gradients together, one bucket at a time.

    Runs as blocking code on the communication thread, while the backward pass of earlier layers goes on. The
    step that it is given, `t` and `rates` included, was fixed when the first gradients left.
    """

    @property
    def shards(self) -> bool:
        """True: `b.g_own` is the result and each position updates its own chunk. False: `b.g` is."""
        ...

    @property
    def across(self) -> bool:
        """Whether it brings the gradients of all groups together, and not only those of one."""
        ...

    def idle(self, job: Job) -> bool:
        """Whether there is nothing to do in this job, so that gradients stay where autograd put them."""
        ...

    def __call__(self, s: Step, b: Bucket) -> None: ...


@runtime_checkable
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


def alike_everywhere(states: Mapping[str, State], *, aloud: bool) -> dict[str, State]:
    """What one rank's state is good for on any P × K, its numbers standing for all; the rest is dropped,
    `aloud` or not."""
    kept = {role: {k: v for k, v in state.items() if k in ("same", "mean")} for role, state in states.items()}
    dropped = [f"{role} ({k})" for role, state in states.items() for k in state if k not in kept[role]]
    if dropped and aloud:
        log.warning(
            "state of a method, of one rank of another P × K: %s start anew; checkpoints bring them along",
            ", ".join(dropped),
        )
    return kept


@dataclass(frozen=True)
class Method:
    """A training method: exchange × when × how."""

    exchange: Exchange
    when: Schedule
    how: Averager

    def state_dict(self) -> dict[str, State]:
        """The state of the parts that have one, by their role; collective."""
        return {role: part.state_dict() for role, part in self.stateful().items()}

    def load_state_dict(self, state: Mapping[str, State]) -> None:
        """Raises `UserError` for the state of other parts."""
        mine = self.stateful()
        if mine.keys() != state.keys():
            theirs, ours = (", ".join(names) or "nothing" for names in (state, mine))
            raise UserError(f"state of another method: it is of {theirs}, and this one needs that of {ours}")
        for role, part in mine.items():
            part.load_state_dict(state[role])

    def central(self) -> Central | None:
        """What keeps the model, if anything does at this time."""
        how: Any = self.how
        while not isinstance(how, Central):
            if not isinstance(how, Wrapping):
                return None
            how = how.inner
        return how

    def stateful(self) -> dict[str, Stateful]:
        """The parts with a memory, by their role."""
        return {role: part for role, part in self.by_role() if isinstance(part, Stateful)}

    def counted(self) -> list[str]:
        """The names of what its parts count."""
        names = [name for _, part in self.by_role() if isinstance(part, Counting) for name in part.counted]
        return list(dict.fromkeys(names))

    def exchange_keeps(self) -> bool:
        """Whether an exchange, of a method inside, too, keeps something of a step's gradients for later."""
        exchanges = (part for _, part in self.by_role() if isinstance(part, Exchange))
        return any(isinstance(part, Stateful) for exchange in exchanges for _, part in _by_role("", exchange))

    def by_role(self) -> Iterator[tuple[str, Any]]:
        """All parts; those inside others, too."""
        for role, part in (("exchange", self.exchange), ("when", self.when), ("how", self.how)):
            yield from _by_role(role, part)


def _by_role(role: str, part: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(part, Method):
        for inner, found in part.by_role():
            yield f"{role}.{inner}", found
        return
    yield role, part
    inside = {"inner": part.inner} if isinstance(part, Wrapping) else {}
    for name, inner in (part.parts if isinstance(part, Composed) else inside).items():
        yield from _by_role(f"{role}.{name}", inner)
