"""A method: exchange × when × how, what its parts can do beside that, and what they remember."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from hpcsgd.core.capabilities import Counting, KeepsGradients, Referring
from hpcsgd.core.flat import Bucket
from hpcsgd.core.step import Averager, Exchange, Schedule
from hpcsgd.errors import UserError

log = logging.getLogger(__name__)

State = dict[str, dict[str, Any]]
"""What a part of a method remembers, by name, in sections that say what becomes of it on another P × K:

    same     the same on all ranks: it goes everywhere
    mean     each rank has its number: all get their mean
    chunks   a list with what belongs to `own` of every bucket (to `w` where the averager does not shard): cut
             anew like the parameters, for another P the mean of the groups'; dropped where there is one
             group, unless they are an exchange's
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


def fitted(
    states: Mapping[str, State], buckets: Sequence[Bucket], *, same_ranks: bool, aloud: bool
) -> dict[str, State]:
    """One rank's `states` for these buckets, of as many groups and positions or of others."""
    placed = _beside(states, buckets)
    return placed if same_ranks else _alike_everywhere(placed, aloud=aloud)


def _alike_everywhere(states: Mapping[str, State], *, aloud: bool) -> dict[str, State]:
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


def _beside(states: Mapping[str, State], buckets: Sequence[Bucket]) -> dict[str, State]:
    """`states` with their chunks on the devices of the model: they may have been read elsewhere."""

    def placed(vectors: Sequence[Tensor]) -> list[Tensor]:
        return [x.to(b.w.device) for x, b in zip(vectors, buckets, strict=True)]

    return {
        role: {**state, "chunks": {name: placed(vectors) for name, vectors in state["chunks"].items()}}
        if "chunks" in state
        else state
        for role, state in states.items()
    }


@dataclass(frozen=True)
class Method:
    """A training method: exchange × when × how. The factories of `hpcsgd.methods` make it.

    Not to be confused with an optimizer: that makes the update of one group, and is the user's own.

    Args:
        exchange: how the K gradients of a group come together, every step.
        when: whether groups meet after this update, the same answer on every rank.
        how: what happens when they do.

    Raises:
        UserError: for the state of other parts.

    Example:
        >>> method = hpcsgd.hierarchical(every=8)
        >>> method.when
        Every(I=8)
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, job, method)
    """

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
        return any(_keeps_gradients(part) for exchange in exchanges for _, part in parts_of("", exchange))

    def by_role(self) -> Iterator[tuple[str, Any]]:
        """All parts; those inside others, too."""
        for role, part in (("exchange", self.exchange), ("when", self.when), ("how", self.how)):
            yield from parts_of(role, part)


def remembering(part: Any) -> dict[str, Stateful]:
    """What has a memory of `part` and what is inside it, by role."""
    return {role: found for role, found in parts_of("how", part) if isinstance(found, Stateful)}


def refer(how: Any, common: Sequence[Tensor]) -> None:
    """Tell whoever in `how` sends differences that all groups have `common` now."""
    while isinstance(how, Wrapping):
        how = how.inner
    if isinstance(how, Referring):
        how.refer_to(common)


def _keeps_gradients(part: Any) -> bool:
    return part.keeps_gradients if isinstance(part, KeepsGradients) else isinstance(part, Stateful)


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
