"""What a part of a method may do beside its own: all optional protocols, and who asks for them.

    Prepares   an averager acts before an update
    Late       an averager's results arrive some updates after they were asked for
    Stateful   a part has a memory, which a checkpoint keeps

A part that is around another one, or made of several, says so (`Wrapping`, `Composed`): each of those inside
is asked for itself, and whoever is around them passes nothing on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from hpcsgd.core.averager import Averager, run_averager
from hpcsgd.core.state import State
from hpcsgd.core.step import Step


@runtime_checkable
class Prepares(Protocol):
    """An averager that has something to do before an update."""

    def prepare(self, vectors: Sequence[Tensor], s: Step) -> None:
        """Act before the update of step `s`, whose gradients have been averaged in the group.

        `vectors` are those that `average` is given after it. It may change them, and the gradients if
        `Traits.reads_gradients` says so. Collective.
        """
        ...


@runtime_checkable
class Late(Protocol):
    """An averager whose results arrive while training goes on, or that has work between two synchronizations.

    After each update it is asked whether it `is_due`, once; then either `average` or `begin` is called.
    """

    def is_due(self, s: Step, wanted: bool) -> bool:
        """Return whether `average` is to be called after this update, where the schedule said `wanted`; the
        same on every rank."""
        ...

    def begin(self, vectors: Sequence[Tensor], s: Step) -> None:
        """Begin what there is to begin after an update after which `average` is not called. It leaves
        `vectors` alone, which are being gathered meanwhile. Collective."""
        ...

    def finish(self, vectors: Sequence[Tensor], s: Step, due: bool) -> None:
        """Take everything into `vectors` that is under way, and begin nothing that arrives later. `due`: what
        `is_due` returned. Collective."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """A part of a method with a memory: all that a restart needs beside parameters and moments."""

    def state_dict(self) -> State:
        """Return it, without copies: whoever keeps it clones. Collective: messages under way are waited
        for."""
        ...

    def load_state_dict(self, state: State) -> None:
        """Go on from there, with the very tensors of `state`; of what is not in it, as new."""
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


def prepare(averager: Averager, vectors: Sequence[Tensor], s: Step) -> None:
    """Let `averager`, and then what is inside it, act before an update. Collective."""
    part: Any = averager
    while True:
        if isinstance(part, Prepares):
            part.prepare(vectors, s)
        if not isinstance(part, Wrapping):
            return
        part = part.inner


def is_due(averager: Averager, s: Step, wanted: bool) -> bool:
    """Return whether `averager` averages after this update: if that is `wanted`, unless it is late."""
    return averager.is_due(s, wanted) if isinstance(averager, Late) else wanted


def begin(averager: Averager, vectors: Sequence[Tensor], s: Step) -> None:
    """Begin what a late one has to begin after an update after which it does not average. Collective."""
    if isinstance(averager, Late):
        averager.begin(vectors, s)


def finish(averager: Averager, vectors: Sequence[Tensor], s: Step, due: bool) -> None:
    """Average for the last time: if that is `due`, or has been under way. Collective."""
    if isinstance(averager, Late):
        averager.finish(vectors, s, due)
    elif due:
        run_averager(averager, vectors, s)
