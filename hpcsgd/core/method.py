"""A method: exchange × when × how, what its parts can do beside that, and what they remember."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from hpcsgd.arguments import checked, of_kind
from hpcsgd.core.averager import Averager, Traits
from hpcsgd.core.flat import Bucket
from hpcsgd.core.optional import Composed, Staged, Stateful, Wrapping
from hpcsgd.core.state import State
from hpcsgd.core.step import GradReduce, Schedule
from hpcsgd.core.traits import GradReduceTraits, ScheduleTraits
from hpcsgd.core.waits import All, Unknown, Waits, with_period
from hpcsgd.errors import UserError

log = logging.getLogger(__name__)


@runtime_checkable
class HoldsModel(Protocol):
    """An averager for which the model is not the mean of what the groups train on: servers keep it, say."""

    def model(self) -> list[Tensor] | None:
        """This position's chunks of it, like `owned`, in float32 at least; None before the first update,
        when all groups have the same. Collective."""
        ...


def waits_of(exchange: GradReduce, schedule: Schedule, averager: Averager) -> Waits:
    """Return who waits for whom in the steps of a method of these parts."""
    waits = averager.traits.waits
    if isinstance(averager, Staged):  # each of its methods has said how often
        return waits
    if exchange.traits.across:
        return All(period=1)
    if schedule.traits.rate == 0:
        return Unknown("its groups never average")
    return with_period(waits, schedule.traits.spacing)


def fitted(
    states: Mapping[str, State], buckets: Sequence[Bucket], *, same_ranks: bool, aloud: bool
) -> dict[str, State]:
    """One rank's `states` for these buckets, of as many groups and positions or of others."""
    placed = _with(states, buckets)
    return placed if same_ranks else _alike_everywhere(placed, aloud=aloud)


def _alike_everywhere(states: Mapping[str, State], *, aloud: bool) -> dict[str, State]:
    """What one rank's state is good for on any P × K, its numbers standing for all; the rest is dropped,
    `aloud` or not."""
    kept = {role: State(replicated=each.replicated, mean=each.mean) for role, each in states.items()}
    dropped = [f"{role} ({name})" for role, state in states.items() for name in state.not_shared()]
    if dropped and aloud:
        log.warning(
            "state of a method, of one rank of another P × K: %s start anew; checkpoints bring them along",
            ", ".join(dropped),
        )
    return kept


def _with(states: Mapping[str, State], buckets: Sequence[Bucket]) -> dict[str, State]:
    """`states` with what is sharded on the devices of the model: they may have been read elsewhere."""

    def placed(vectors: Sequence[Tensor]) -> list[Tensor]:
        return [x.to(b.w.device) for x, b in zip(vectors, buckets, strict=True)]

    return {
        role: replace(state, sharded={name: placed(vectors) for name, vectors in state.sharded.items()})
        for role, state in states.items()
    }


@checked
@dataclass(frozen=True)
class Method:
    """A training method: exchange × when × how. The factories of `hpcsgd.methods` make it.

    Not to be confused with an optimizer: that makes the update of one group, and is the user's own.

    Args:
        grad_reduce: how the K gradients of a group come together, every step.
        schedule: whether groups meet after this update, the same answer on every rank.
        averager: what happens when they do.

    Raises:
        UserError: for a part without traits, or with those of another kind; for the state of other parts.

    Example:
        >>> method = hpcsgd.hierarchical(sync_every=8)
        >>> method.schedule
        Every(I=8)
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
    """

    grad_reduce: GradReduce
    schedule: Schedule
    averager: Averager

    def __post_init__(self) -> None:
        of_kind("Method", "grad_reduce.traits", GradReduceTraits, self.grad_reduce.traits)
        of_kind("Method", "schedule.traits", ScheduleTraits, self.schedule.traits)
        of_kind("Method", "averager.traits", Traits, self.averager.traits)

    @property
    def waits(self) -> Waits:
        """Who waits for whom in its steps."""
        return waits_of(self.grad_reduce, self.schedule, self.averager)

    @property
    def sequence(self) -> Sequence[tuple[int | None, Method]]:
        """The methods that it changes between, as `Staged` has them; none where it stays as it is."""
        return self.averager.sequence if isinstance(self.averager, Staged) else ()

    def state_dict(self) -> dict[str, State]:
        """The state of the parts that have one, by their role, as it is now; collective."""
        return {role: state.cloned() for role, state in self.states().items()}

    def states(self) -> dict[str, State]:
        """As `state_dict`, but without copies: the next step changes them. Collective."""
        found = {role: part.state_dict() for role, part in self.stateful().items()}
        return {role: of_kind("Method", f"{role}.state_dict()", State, each) for role, each in found.items()}

    def load_state_dict(self, state: Mapping[str, State]) -> None:
        """Raises `UserError` for the state of other parts."""
        mine = self.stateful()
        if mine.keys() != state.keys():
            theirs, ours = (", ".join(names) or "nothing" for names in (state, mine))
            raise UserError(f"state of another method: it is of {theirs}, and this one needs that of {ours}")
        for role, part in mine.items():
            part.load_state_dict(state[role].cloned())

    def model_holder(self) -> HoldsModel | None:
        """What keeps the model, if anything does at this time."""
        how: Any = self.averager
        while not isinstance(how, HoldsModel):
            if not isinstance(how, Wrapping):
                return None
            how = how.inner
        return how

    def stateful(self) -> dict[str, Stateful]:
        """The parts with a memory, by their role."""
        return {role: part for role, part in self.by_role() if isinstance(part, Stateful)}

    def by_role(self) -> Iterator[tuple[str, Any]]:
        """All parts; those inside others, too."""
        for role, part in (
            ("grad_reduce", self.grad_reduce),
            ("schedule", self.schedule),
            ("averager", self.averager),
        ):
            yield from parts_of(role, part)


def remembering(part: Any) -> dict[str, Stateful]:
    """What has a memory of `part` and what is inside it, by role."""
    return {role: found for role, found in parts_of("averager", part) if isinstance(found, Stateful)}


def parts_of(role: str, part: Any) -> Iterator[tuple[str, Any]]:
    """`part` and all parts inside it."""
    if isinstance(part, Method):
        for inner, found in part.by_role():
            yield f"{role}.{inner}", found
        return
    yield role, part
    inside = {"inner": part.inner} if isinstance(part, Wrapping) else {}
    for name, inner in (part.parts if isinstance(part, Composed) else inside).items():
        yield from parts_of(f"{role}.{name}", inner)
