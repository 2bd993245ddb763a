"""A method, made of a gradient reduction, a schedule and an averager, and the state of these parts."""

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
class HoldsModel(Averager, Protocol):
    """An averager, such as a parameter server, that holds the model itself.

    The averaged model is then the model that it holds, not the mean of the groups' models.
    """

    def model(self) -> list[Tensor] | None:
        """Return this rank's shards of the model, in float32 at least; collective.

        None before the first update, when all groups have the same model.
        """
        ...


def waits_of(grad_reduce: GradReduce, schedule: Schedule, averager: Averager) -> Waits:
    """Return which groups wait for which in the steps of a method that consists of these parts."""
    waits = averager.traits.waits
    if isinstance(averager, Staged):  # its `waits` already includes how often each of its methods averages
        return waits
    if grad_reduce.traits.across:
        return All(period=1)
    if schedule.traits.rate == 0:
        return Unknown("its groups never average")
    return with_period(waits, schedule.traits.spacing)


def fitted(
    states: Mapping[str, State], buckets: Sequence[Bucket], *, same_ranks: bool, aloud: bool
) -> dict[str, State]:
    """Return the `states` that one rank saved, in a form that this rank can load for `buckets`.

    If P × K has changed, `same_ranks` is False. Then only state that is valid on any P × K is returned. With
    `aloud`, a warning names the state that is discarded.
    """
    placed = _with(states, buckets)
    return placed if same_ranks else _alike_everywhere(placed, aloud=aloud)


def _alike_everywhere(states: Mapping[str, State], *, aloud: bool) -> dict[str, State]:
    """Return the part of one rank's state that is valid on any P × K.

    With `aloud`, log a warning that names the rest, which is discarded.
    """
    kept = {role: State(replicated=each.replicated, mean=each.mean) for role, each in states.items()}
    dropped = [f"{role} ({name})" for role, state in states.items() for name in state.not_shared()]
    if dropped and aloud:
        log.warning(
            "the method's state was saved by one rank on another P × K: discarded %s, which only a "
            "checkpoint of all ranks can convert",
            ", ".join(dropped),
        )
    return kept


def _with(states: Mapping[str, State], buckets: Sequence[Bucket]) -> dict[str, State]:
    """Return `states` with the sharded tensors on the devices of the buckets."""

    def placed(vectors: Sequence[Tensor]) -> list[Tensor]:
        return [x.to(b.w.device) for x, b in zip(vectors, buckets, strict=True)]

    return {
        role: replace(state, sharded={name: placed(vectors) for name, vectors in state.sharded.items()})
        for role, state in states.items()
    }


@checked
@dataclass(frozen=True)
class Method:
    """A training method: a gradient reduction, a schedule and an averager.

    The functions of `hpcsgd.methods` make it. A method does not update parameters: the user's optimizer does.

    Args:
        grad_reduce: How the K ranks of a group average their gradients in every step.
        schedule: Decides after each update whether the groups average their models, alike on every rank.
        averager: How the groups average their models.

    Raises:
        UserError: If a part has no traits or traits of another kind, or if a loaded state belongs to other
            parts.

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
        """Which groups wait for which in the steps of this method."""
        return waits_of(self.grad_reduce, self.schedule, self.averager)

    @property
    def sequence(self) -> Sequence[tuple[int | None, Method]]:
        """The methods that this one switches between, as in `Staged`; empty if it does not switch."""
        return self.averager.sequence if isinstance(self.averager, Staged) else ()

    def state_dict(self) -> dict[str, State]:
        """Return a copy of the state of each part that has state, by the role of the part; collective."""
        return {role: state.cloned() for role, state in self.states().items()}

    def states(self) -> dict[str, State]:
        """Return the states that `state_dict` copies. The next step changes their tensors. Collective."""
        found = {role: part.state_dict() for role, part in self.stateful().items()}
        return {role: of_kind("Method", f"{role}.state_dict()", State, each) for role, each in found.items()}

    def load_state_dict(self, state: Mapping[str, State]) -> None:
        """Load `state`, or raise `UserError` if it is the state of other parts."""
        mine = self.stateful()
        if mine.keys() != state.keys():
            theirs, ours = (", ".join(names) or "nothing" for names in (state, mine))
            raise UserError(f"state of another method: it is of {theirs}, and this one needs that of {ours}")
        for role, part in mine.items():
            part.load_state_dict(state[role].cloned())

    def model_holder(self) -> HoldsModel | None:
        """Return the averager, or the one inside it, that holds the model at this time, or None."""
        how: Any = self.averager
        while not isinstance(how, HoldsModel):
            if not isinstance(how, Wrapping):
                return None
            how = how.inner
        return how

    def stateful(self) -> dict[str, Stateful]:
        """Return the parts that have state, by their role, such as `averager.inner`."""
        return {role: part for role, part in self.by_role() if isinstance(part, Stateful)}

    def by_role(self) -> Iterator[tuple[str, Any]]:
        """Yield all parts with their roles, including parts inside other parts."""
        for role, part in (
            ("grad_reduce", self.grad_reduce),
            ("schedule", self.schedule),
            ("averager", self.averager),
        ):
            yield from parts_of(role, part)


def remembering(part: Any) -> dict[str, Stateful]:
    """Return the parts that have state, by their roles: the averager `part`, and the parts inside it."""
    return {role: found for role, found in parts_of("averager", part) if isinstance(found, Stateful)}


def parts_of(role: str, part: Any) -> Iterator[tuple[str, Any]]:
    """Yield `part` and all parts inside it with their roles."""
    if isinstance(part, Method):
        for inner, found in part.by_role():
            yield f"{role}.{inner}", found
        return
    yield role, part
    inside = {"inner": part.inner} if isinstance(part, Wrapping) else {}
    for name, inner in (part.parts if isinstance(part, Composed) else inside).items():
        yield from parts_of(f"{role}.{name}", inner)
